"""Plans for this machine, compared with real runs. (Those for TPUs and GPUs: ``test_accelerators.py``.)"""

import gc
import json
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax import errors
from replicax._plan.planning import plan_of
from replicax._src.devices import hardware
from replicax._src.strategies.lower_method import StepToLower

ROWS, IN, OUT = 6, 32, 16
F32 = 4


class Training:
    """Two replicas, a layer with momentum, and a per-replica counter."""

    def __init__(self, strategy=None):
        self.strategy = strategy or rx.MirroredStrategy(["cpu:0", "cpu:1"])
        with self.strategy.scope():
            self.w = rx.Variable(np.ones((IN, OUT), np.float32), name="w")
            self.momentum = rx.Variable(np.zeros((IN, OUT), np.float32), name="momentum")
            self.seen = rx.Variable(
                0.0, name="seen", synchronization="on_read", aggregation="sum", trainable=False
            )
            self.rate = rx.Variable(0.1, name="rate", trainable=False)
        self.step = self.make_step()

    def make_step(self):
        def step(x, y):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(jnp.sum((x @ self.w - y) ** 2, axis=1))
            gradient = rx.get_replica_context().all_reduce("sum", tape.gradient(loss, self.w))
            self.momentum.assign(0.9 * self.momentum + gradient)
            self.w.assign_sub(self.rate * self.momentum)
            self.seen.assign_add(float(ROWS))
            return loss

        return step

    def batch(self):
        x, y = np.ones((2 * ROWS, IN), np.float32), np.ones((2 * ROWS, OUT), np.float32)
        dataset = rx.data.from_arrays((x, y)).batch(2 * ROWS)
        return next(iter(self.strategy.experimental_distribute_dataset(dataset)))


STATE = 2 * IN * OUT * F32 + F32 + F32
BATCH = ROWS * (IN + OUT) * F32


def alive_on_first_device():
    """All live buffers, by address; they stay while this is held, so that no other gets one of these addresses."""
    gc.collect()
    device = jax.devices()[0]
    # Looking at an array creates more arrays, with the same buffers.
    return {
        shard.data.unsafe_buffer_pointer(): shard.data
        for array in jax.live_arrays()
        if not array.is_deleted()
        for shard in array.addressable_shards
        if shard.device == device
    }


def bytes_since(before):
    return sum(data.nbytes for address, data in alive_on_first_device().items() if address not in before)


@pytest.fixture(scope="module")
def training():
    return Training()


@pytest.fixture(scope="module")
def plan(training):
    return training.strategy.plan(training.step, args=training.batch())


def test_memory_is_that_of_a_run():
    before = alive_on_first_device()
    training = Training()
    strategy, batch = training.strategy, training.batch()
    plan = strategy.plan(training.step, args=batch)
    assert plan.memory.arguments == STATE + BATCH
    assert strategy.runner.num_programs == 0

    loss = strategy.run(training.step, args=batch)
    ran = strategy.runner.last_launcher
    analysis = ran.lower([value.stored for value in batch]).compile().memory_analysis()
    memory = plan.memory
    assert memory.arguments == analysis.argument_size_in_bytes
    assert memory.temporaries == analysis.temp_size_in_bytes
    assert memory.outputs == analysis.output_size_in_bytes
    assert memory.donated == analysis.alias_size_in_bytes
    jax.block_until_ready(loss.stored)
    addresses = 8 * 5  # which CPU counts as results too: of three variables, the loss and a token
    assert bytes_since(before) == memory.arguments + memory.outputs - addresses - memory.donated


@pytest.mark.rest
def test_nothing_changes(training):
    old = training.w.numpy()
    batch = training.batch()
    alive = alive_on_first_device()
    training.strategy.plan(training.step, args=batch, topology="cpu:4")
    assert bytes_since(alive) == 0
    np.testing.assert_array_equal(training.w.numpy(), old)
    assert training.strategy.num_replicas_in_sync == 2


def test_costs_and_collectives(plan):
    assert plan.flops == {"float32": 2 * 2 * ROWS * IN * OUT}
    (of_program,) = [one for one in plan.requested if one.bytes == IN * OUT * F32]
    assert (of_program.kind, of_program.count, of_program.axes) == ("all-reduce", 1, ("replica",))
    sent = sum(one.wire_bytes for one in plan.compiled)
    assert sent == sum(one.wire_bytes for one in plan.requested) >= IN * OUT * F32


def test_layouts(plan):
    where = {
        array.name: (array.role, array.device_bytes, array.split[:1], array.is_written)
        for array in plan.arrays
    }
    assert where == {
        "w": ("variable", IN * OUT * F32, (None,), True),
        "momentum": ("variable", IN * OUT * F32, (None,), True),
        "seen": ("variable", F32, ("replica",), True),
        "rate": ("variable", F32, (), False),
        "args[0]": ("argument", ROWS * IN * F32, ("replica",), False),
        "args[1]": ("argument", ROWS * OUT * F32, ("replica",), False),
    }


def test_rows_are_kept_unless_a_global_batch_is_given(training):
    kept = training.strategy.plan(training.step, args=training.batch(), topology="cpu:5")
    assert (kept.num_replicas, kept.rows, kept.global_batch) == (5, ROWS, 5 * ROWS)
    given = training.strategy.plan(training.step, args=training.batch(), topology="cpu:4", global_batch=10)
    assert (given.rows, given.global_batch) == (3, 12)  # of 10 rows over 4 replicas some have 3
    assert given.memory.arguments == STATE + BATCH // 2


def test_described_arguments_are_those_of_one_replica(training, plan):
    x, y = (jax.ShapeDtypeStruct((ROWS, n), np.float32) for n in (IN, OUT))
    assert training.strategy.plan(training.step, args=(x, y)).memory == plan.memory


def test_a_step_with_run_and_reduce_in_it(training, plan):
    @rx.function
    def step(batch):
        losses = training.strategy.run(training.step, args=batch)
        return training.strategy.reduce("sum", losses, axis=None)

    whole = training.strategy.plan(step, args=(training.batch(),))
    assert whole.memory.arguments == plan.memory.arguments
    assert whole.flops == plan.flops
    assert {a.name for a in whole.arrays if a.role == "variable"} == {"w", "momentum", "seen", "rate"}
    assert whole.rows == ROWS


def test_functional_state_is_described_by_replicate(training):
    strategy = training.strategy
    params = strategy.replicate({"w": jax.ShapeDtypeStruct((IN, OUT), np.float32)})

    def step(params, x):
        gradient = jax.grad(lambda w: jnp.sum((x @ w) ** 2))(params["w"])
        return {"w": params["w"] - rx.get_replica_context().all_reduce("sum", gradient)}

    x = jax.ShapeDtypeStruct((ROWS, IN), np.float32)
    plan = strategy.plan(step, args=(params, x), options=rx.RunOptions(donate_args=(0,)), topology="cpu:4")
    assert plan.memory.arguments == IN * OUT * F32 + ROWS * IN * F32
    assert plan.memory.donated == IN * OUT * F32
    assert [array.name for array in plan.arrays] == ["args[0]['w']", "args[1]"]


def test_plain_arrays_are_replicated():
    """As ``run`` passes them to every replica."""
    x, table = np.ones((ROWS, IN), "float32"), jnp.ones((IN, 4))
    plan = rx.MirroredStrategy(["cpu:0"]).plan(
        lambda x, more: x @ more["table"] * more["scale"],
        (x, {"table": table, "scale": 2.0}),
        topology="cpu:4",
    )
    assert [(a.name, a.device_bytes, a.split) for a in plan.arrays] == [
        ("args[0]", x.nbytes, (None, None)),
        ("args[1]['table']", table.nbytes, (None, None)),
    ]
    assert plan.memory.arguments - x.nbytes - table.nbytes <= F32  # the number


@pytest.fixture
def forgotten_by_keras():
    """Keras gives values to variables without values at the next trace: it forgets them."""
    yield
    keras.utils.clear_session()


@pytest.mark.rest
def test_a_keras_model_without_values(forgotten_by_keras):
    """48 GB of variables, none of which is allocated: neither the model's nor the optimizer's."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        optimizer = keras.optimizers.Adam()
        with keras.StatelessScope(initialize_variables=False):
            model = keras.Sequential(
                [keras.Input((4,)), keras.layers.Dense(1_000_000), keras.layers.Dense(4_000)]
            )

    def step(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum(model(x), axis=1))
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        )

    plan = strategy.plan(step, args=(jax.ShapeDtypeStruct((2, 4), np.float32),))
    num_weights = 4 * 1_000_000 + 1_000_000 + 1_000_000 * 4_000 + 4_000
    of_variables = sum(a.device_bytes for a in plan.arrays if a.role == "variable")
    assert of_variables == pytest.approx(3 * num_weights * F32, abs=64)
    assert all(variable._value is None for variable in model.variables)


@pytest.fixture
def machine_of(monkeypatch):
    """Sets the memory of this machine, in bytes."""

    def set_memory(num_bytes):
        monkeypatch.setattr(hardware, "_memory_of_machine", lambda: num_bytes)
        hardware.this_machine.cache_clear()

    yield set_memory
    hardware.this_machine.cache_clear()


def test_excess_and_remedies(training, plan, machine_of):
    machine_of(2 * plan.memory.peak)  # enough for two devices with as many rows as there are
    large = training.strategy.plan(
        training.step, args=training.batch(), topology="cpu:2", global_batch=2 * 4 * ROWS
    )
    assert not large.fits
    not_enough, enough, *divided = large.remedies
    assert not not_enough.fits
    assert enough.fits
    assert enough.peak == plan.memory.peak < not_enough.peak < large.memory.peak
    assert enough.change == f"{ROWS} rows for each replica (a global batch of {2 * ROWS})"
    assert {remedy.shard_state for remedy in divided} == {"all"}  # these variables are no optimizer's
    assert "It does not fit" in str(large)
    assert enough.change in str(large)


def test_variables_too_large_for_a_device_are_sharded(training, plan, machine_of):
    machine_of(2 * plan.memory.peak - 2 * 64)
    found = training.strategy.plan(training.step, args=training.batch(), topology="cpu:2")
    assert not found.fits
    everything = found.remedies[-1]
    assert (everything.shard_state, everything.shard_size, everything.is_compiled) == ("all", 2, True)
    divided = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all"))
    same = divided.strategy.plan(divided.step, args=divided.batch())
    assert same.shard_size == 2
    assert everything.peak == same.memory.peak
    assert same.memory.arguments == plan.memory.arguments - IN * OUT * F32  # of w and of momentum a half


def test_plan_is_reported_before_its_remedies(training, plan, machine_of):
    machine_of(2 * plan.memory.peak)
    heard = []
    step = StepToLower(training.step, training.batch(), {}, global_batch=16 * ROWS)
    found = plan_of(
        training.strategy, step, "cpu:2", 120.0, tell=lambda text, plan: heard.append((text, plan))
    )
    (traced, none), (answer, first), *remedies = heard
    assert "compiling for cpu:2" in traced
    assert none is None
    assert answer.startswith("It does not fit")
    assert first.memory == found.memory
    assert not first.remedies
    assert len(remedies) == len(found.remedies) > 0


def test_no_time_for_remedies(training, machine_of):
    machine_of(STATE)
    found = training.strategy.plan(
        training.step, args=training.batch(), topology="cpu:2", global_batch=4 * ROWS, remedy_limit_s=0
    )
    assert "no batch is small enough" in str(found)
    assert not any(remedy.is_compiled for remedy in found.remedies)
    assert "of arguments alone, which do not fit either" in str(found)


def test_text_and_json_have_the_same_facts(plan):
    facts = json.loads(plan.to_json())
    assert facts["memory"]["arguments"] == plan.memory.arguments
    assert facts["fits"] is True
    assert facts["arrays"][0].keys() >= {"name", "device_bytes", "split"}
    text = str(plan)
    assert "a batch of 6 rows for each replica, 12 in all" in text
    assert "no roofline" in text
    for array in plan.arrays:
        assert array.name in text


def test_the_picture_has_every_array(plan):
    root = ElementTree.fromstring(plan.to_svg())
    texts = [text.text for text in root.iter("{http://www.w3.org/2000/svg}text")]
    rects = list(root.iter("{http://www.w3.org/2000/svg}rect"))
    bars = [int(rect.get("width")) for rect in rects if rect.get("class") == "bar"]
    assert {array.name for array in plan.arrays} <= set(texts)
    assert len(bars) == len(plan.arrays)
    assert bars == sorted(bars, reverse=True)
    assert any("dim 0 over replica, 1 of 2" in text for text in texts)
    assert any("a device's memory" in text for text in texts)


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
def test_without_the_extra(training, topology, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(errors.MissingExtraError, match=r"the extra plan-(tpu|gpu)"):
        training.strategy.plan(training.step, args=training.batch(), topology=topology)


@pytest.mark.parametrize(
    ("bad", "kind", "told"),
    [
        ({"topology": "v5p:16x16x17"}, errors.TopologyError, "v5p:16x16x16"),
        ({"global_batch": 0}, errors.InvalidArgumentError, "at least 1"),
        ({"remedy_limit_s": -1}, errors.InvalidArgumentError, "remedy_limit_s"),
        ({"args": 3}, errors.InvalidArgumentError, "list or tuple"),
        ({"kwargs": "cpu:8"}, errors.InvalidArgumentError, "topology='v5p:16x16x16'"),
        ({"fn": 3}, errors.InvalidArgumentError, "function, got 3"),
        ({"options": {"donate": 1}}, errors.InvalidArgumentError, "RunOptions"),
        ({"options": rx.RunOptions(donate_args=(7,))}, errors.InvalidArgumentError, "positions in args"),
    ],
)
def test_bad_input(training, bad, kind, told):
    given = {"fn": training.step, "args": training.batch()} | bad
    with pytest.raises(kind, match=told):
        training.strategy.plan(given.pop("fn"), **given)


def test_a_global_batch_that_does_not_divide(training):
    plan = training.strategy.plan(training.step, args=training.batch(), topology="CPU:4", global_batch=9)
    assert (plan.rows, plan.global_batch) == (3, 12)
    assert any("9 rows does not divide by 4 replicas" in note for note in plan.notes)
    even = training.strategy.plan(training.step, args=training.batch(), topology="cpu:4", global_batch=8)
    assert not any("does not divide" in note for note in even.notes)


def test_a_plan_says_that_the_batch_grows_with_the_replicas(training):
    """``batch_size=12`` on two devices is 24 rows on four, unless ``global_batch`` says otherwise."""
    grown = training.strategy.plan(training.step, args=training.batch(), topology="cpu:4")
    assert f"Each of the 4 replicas has {ROWS} rows, as each of the 2 here: {4 * ROWS} in all." in str(grown)
    kept = training.strategy.plan(
        training.step, args=training.batch(), topology="cpu:4", global_batch=2 * ROWS
    )
    assert "as each of" not in str(kept)
    assert "as each of" not in str(training.strategy.plan(training.step, args=training.batch()))


def test_a_plan_with_many_variables_shows_the_batch():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variables = [rx.Variable(np.ones(8, np.float32), name=f"v{number}") for number in range(30)]

    def step(rows):
        return rows.sum() * sum(jnp.sum(variable.value) for variable in variables)

    printed = str(strategy.plan(step, args=(jax.ShapeDtypeStruct((3, 2), "float32"),), topology="cpu:2"))
    assert "… and 10 smaller variables" in printed
    assert printed.index("smaller variables") < printed.index("args[0]  float32[2, 3, 2]")


def test_a_function_that_loops_over_a_dataset_is_several_programs(training):
    @rx.function
    def several(iterator):
        for _ in range(2):
            training.strategy.run(lambda x: x.sum(), args=(next(iterator),))

    batches = training.strategy.experimental_distribute_dataset([np.ones((4, IN), np.float32)] * 2)
    with (
        iter(batches) as iterator,
        pytest.raises(errors.UnsupportedError, match="the step that it passes to"),
    ):
        training.strategy.plan(several, (iterator,))


def test_variables_elsewhere_are_not_planned():
    with pytest.raises(errors.UnsupportedError, match="CentralStorageStrategy"):
        rx.CentralStorageStrategy(["cpu:0"]).plan(lambda: None)


def test_users_error_is_raised_unchanged(training):
    with pytest.raises(ZeroDivisionError):
        training.strategy.plan(lambda x: 1 / 0, args=training.batch()[:1], topology="cpu:2")
    assert training.strategy.num_replicas_in_sync == 2

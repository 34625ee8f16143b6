"""``Strategy.lower``: the program of a step as JAX lowers it, compared with the one that a run compiles."""

import importlib.util
import re
import subprocess
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax import errors
from replicax._src.devices import ahead_of_time

ROWS, IN, OUT = 6, 32, 16
COLLECTIVE = re.compile(r" = (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all)(?:-start)?\(")


def memory_of(lowered):
    analysis = lowered.compile().memory_analysis()
    return tuple(
        getattr(analysis, f"{part}_size_in_bytes") for part in ("argument", "output", "temp", "alias")
    )


def collectives_of(lowered):
    """The shape and kind of each collective of the compiled program, in order."""
    return COLLECTIVE.findall(lowered.compile().as_text())


class Training:
    """A step with a gradient, a sum over replicas and a binding, of as many replicas."""

    def __init__(self, num_replicas=2, **options):
        self.strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)], **options)
        with self.strategy.scope():
            self.w = rx.Variable(np.ones((IN, OUT), np.float32), name="w")
            self.momentum = rx.Variable(np.zeros((IN, OUT), np.float32), name="momentum")

        def step(x, y):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(jnp.sum((x @ self.w - y) ** 2, axis=1))
            gradient = rx.get_replica_context().all_reduce("sum", tape.gradient(loss, self.w))
            self.momentum.assign(0.9 * self.momentum + gradient)
            self.w.assign_sub(0.1 * self.momentum)
            return loss

        self.step = step

    def batch(self):
        rows = self.strategy.num_replicas_in_sync * ROWS
        x, y = np.ones((rows, IN), np.float32), np.ones((rows, OUT), np.float32)
        dataset = rx.data.from_arrays((x, y)).batch(rows)
        return next(iter(self.strategy.experimental_distribute_dataset(dataset)))

    def ran(self):
        """The program that ``run`` has compiled, lowered again."""
        batch = self.batch()
        self.strategy.run(self.step, args=batch)
        return self.strategy.runner.last_launcher.lower([value.stored for value in batch])


DESCRIBED = tuple(jax.ShapeDtypeStruct((ROWS, n), np.float32) for n in (IN, OUT))


@pytest.mark.parametrize("options", [{}, {"shard_state": "all"}], ids=["mirrored", "sharded_state"])
def test_it_is_the_program_that_run_compiles(options):
    training = Training(**options)
    lowered = training.strategy.lower(training.step, args=training.batch())
    assert isinstance(lowered, jax.stages.Lowered)
    assert training.strategy.runner.num_programs == 0
    np.testing.assert_array_equal(training.w.numpy(), np.ones((IN, OUT)))
    ran = training.ran()
    assert memory_of(lowered) == memory_of(ran)
    assert collectives_of(lowered) == collectives_of(ran) != []


@pytest.mark.parametrize("options", [{}, {"shard_state": "all"}], ids=["mirrored", "sharded_state"])
def test_for_more_devices_it_is_the_program_of_a_run_on_as_many(options):
    training = Training(**options)
    here, there = (training.strategy.lower(training.step, DESCRIBED, topology=f"cpu:{n}") for n in (2, 4))
    real = Training(4, **options).ran()
    assert memory_of(there) == memory_of(real)
    assert collectives_of(there) == collectives_of(real)
    if options:  # of the variables each device holds a quarter in place of a half
        assert memory_of(there)[0] < memory_of(here)[0]


def test_a_function_with_run_and_reduce_in_it():
    training = Training()

    @rx.function
    def whole(x, y):
        return training.strategy.reduce("mean", training.strategy.run(training.step, args=(x, y)), axis=None)

    lowered = training.strategy.lower(whole, training.batch())
    assert {kind for _, kind in collectives_of(lowered)} == {"all-reduce"}
    variables = 2 * IN * OUT * 4
    assert memory_of(lowered)[0] == variables + ROWS * (IN + OUT) * 4
    np.testing.assert_array_equal(training.w.numpy(), np.ones((IN, OUT)))


def fitted(num_replicas, fit):
    """The program that ``fit`` (or its plan) makes of a model, its data and options."""
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((IN,)), keras.layers.Dense(8, "tanh"), keras.layers.Dense(OUT)])
        model.compile("adam", keras.losses.MeanSquaredError())
    rows = num_replicas * ROWS
    data = np.ones((rows, IN), np.float32), np.ones((rows, OUT), np.float32)
    return fit(strategy, model, data, {"batch_size": rows, "verbose": 0})


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_a_step_of_fit_is_the_one_that_fit_compiles(num_replicas, monkeypatch):
    from replicax._src.lowering import global_view

    ran = []
    launch = global_view._Program._launch
    monkeypatch.setattr(
        global_view._Program, "_launch", lambda one, *args: (ran.append(one), launch(one, *args))[1]
    )
    held = []

    def real(strategy, model, data, options):
        original = global_view._Program.described
        model.fit(*data, **options)
        program = ran[0]
        from replicax._src.keras.phases import TRAIN
        from replicax._src.lowering.held_state import HeldState

        state = HeldState(strategy.topology)
        state.hold([[variable.value for variable in group] for group in TRAIN.variables_of(model)])
        held.append(state)
        compiled, operands = original(program, state)
        return compiled.lower(*operands)

    def lowered(strategy, model, data, options):
        return strategy.lower(model.fit, data, options, topology=f"cpu:{num_replicas}")

    here, there = fitted(num_replicas, real), fitted(2, lowered)
    assert memory_of(there) == memory_of(here)
    assert collectives_of(there) == collectives_of(here) != []


def test_plan_has_the_same_program():
    training = Training()
    plan = training.strategy.plan(training.step, DESCRIBED, topology="cpu:4")
    arguments, outputs, temporaries, donated = memory_of(
        training.strategy.lower(training.step, DESCRIBED, topology="cpu:4")
    )
    memory = plan.memory
    assert (memory.arguments, memory.outputs, memory.temporaries, memory.donated) == (
        arguments,
        outputs,
        temporaries,
        donated,
    )


WITHOUT_PLANS = """
import sys
import jax, replicax as rx
x = jax.ShapeDtypeStruct((4, 2), "float32")
rx.MirroredStrategy(["cpu:0"]).lower(lambda x: x.sum(), (x,), topology="cpu:2")
print([name for name in sys.modules if name.startswith("replicax._plan")])
"""


def test_lower_imports_nothing_of_plans():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_PLANS], capture_output=True, text=True, check=True, timeout=120
    )
    assert run.stdout.strip() == "[]"


@pytest.mark.parametrize(("topology", "extra"), [("v5e:2x4", "plan-tpu"), ("h100:1x8", "plan-gpu")])
def test_without_its_compiler(topology, extra, monkeypatch):
    found = importlib.util.find_spec
    compilers = ("libtpu", "jax_plugins.xla_cuda12")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in compilers else found(name))
    ahead_of_time._devices.cache_clear()  # of an environment that has the compiler
    with pytest.raises(errors.MissingExtraError, match=re.escape(extra)):
        Training().strategy.lower(Training().step, DESCRIBED, topology=topology)


def test_without_the_variable_that_loads_the_compiler_of_gpus(monkeypatch):
    monkeypatch.setattr(ahead_of_time, "check_extra", lambda hardware: None)
    monkeypatch.delenv(ahead_of_time.GPU_VARIABLE, raising=False)
    ahead_of_time._devices.cache_clear()
    with pytest.raises(errors.PlanError, match=ahead_of_time.GPU_VARIABLE):
        Training().strategy.lower(Training().step, DESCRIBED, topology="h100:1x8")


@pytest.mark.parametrize(
    ("bad", "kind"),
    [
        ({"topology": "v5p:16x16x17"}, errors.TopologyError),
        ({"args": 3}, errors.InvalidArgumentError),
        ({"kwargs": "cpu:8"}, errors.InvalidArgumentError),
        ({"fn": 3}, errors.InvalidArgumentError),
        ({"options": {"donate": 1}}, errors.InvalidArgumentError),
        ({"options": rx.RunOptions(donate_args=(7,))}, errors.InvalidArgumentError),
    ],
)
def test_bad_input(bad, kind):
    training = Training()
    given = {"fn": training.step, "args": DESCRIBED} | bad
    with pytest.raises(kind):
        training.strategy.lower(given.pop("fn"), **given)


def test_variables_elsewhere_are_not_lowered():
    with pytest.raises(errors.UnsupportedError, match="CentralStorageStrategy"):
        rx.CentralStorageStrategy(["cpu:0"]).lower(lambda: None)


def test_users_error_is_raised_unchanged():
    training = Training()
    with pytest.raises(ZeroDivisionError):
        training.strategy.lower(lambda x, y: 1 / 0, DESCRIBED, topology="cpu:4")
    assert training.strategy.num_replicas_in_sync == 2


def test_the_strategy_is_current_while_a_function_is_lowered():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    seen = []

    @rx.function
    def step(x):
        seen.append((rx.get_strategy(), rx.get_strategy().num_replicas_in_sync))
        return x

    strategy.lower(step, (np.float32(1),), topology="cpu:4")
    assert seen == [(strategy, 4)]
    assert not rx.has_strategy()
    assert strategy.num_replicas_in_sync == 2

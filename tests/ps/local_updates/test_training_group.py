"""``rx.experimental.LocalUpdates``: groups in threads of one process exchange through a parameter server on loopback."""

import threading
import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from replicax._ps.local_updates.attached_arrays import AttachedArrays
from replicax._ps.local_updates.outer_optimizer import OuterSgd, outer_optimizer_of
from replicax._ps.local_updates.replay_file import ReplayKind, read_replay_file
from replicax._ps.local_updates.syncers import Syncers
from replicax.errors import (
    ClusterEnvironmentError,
    ContextError,
    InvalidArgumentError,
    StructureError,
    TraceError,
    UnavailableError,
)

WAIT_S = 60.0
MEAN = OuterSgd(1.0, 0.0, False)


@pytest.fixture
def syncer():
    """The address of a parameter server."""
    with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server:
        yield server.target.removeprefix("grpc://")


@pytest.fixture
def group(syncer, monkeypatch):
    """Makes a group by its number and the number of groups."""
    made = []

    def make(index, num_groups, **options):
        monkeypatch.setenv("REPLICAX_GROUP", f"{index}/{num_groups}")
        monkeypatch.setenv("REPLICAX_SYNCERS", options.pop("syncers", syncer))
        made.append(rx.experimental.LocalUpdates(**{"fragments": 1, "outer_optimizer": MEAN, **options}))
        return made[-1]

    yield make
    for each in made:
        each.close()


def together(*functions):
    """Runs functions in threads. Returns their results."""
    results = [None] * len(functions)

    def run(number):
        results[number] = functions[number]()

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(functions))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    return results


def finished(groups):
    return together(*(lambda each=each: each.finish(WAIT_S) for each in groups))


def test_loop_that_reads_nothing_is_not_ahead_of_its_device_after_a_boundary(group):
    @jax.jit
    def long_step(params):
        made = jnp.ones((300, 300)) / 300
        value = jax.lax.fori_loop(0, 100, lambda _, x: x @ made, made)
        return {"w": params["w"] + value.sum()}

    groups = group(0, 1, every=2)
    params = groups.attach({"w": jnp.zeros(3)})
    for _ in range(4):  # the second step of two is at a boundary
        params = groups.step(long_step(params), tokens=1)
        trained = long_step(params)
        params = groups.step(trained, tokens=1)
        assert trained["w"].is_ready()
    groups.close()


def test_group_adopts_what_arrives_between_two_boundaries(group):
    groups = group(0, 1, every=200)
    params = groups.attach({"w": jnp.zeros(3)})
    for _ in range(200):
        params = groups.step({"w": params["w"] + 1.0}, tokens=1)
    while not groups.version and groups.steps < 399:
        time.sleep(0.1)
        params = groups.step(params, tokens=1)
    assert (groups.version, float(params["w"][0])) == (1, 200.0)
    assert groups.steps < 399


@pytest.mark.rest
def test_groups_that_wait_at_each_step_compute_what_one_device_computes(group, tmp_path):
    rows, num_steps = (7, 7, 1, 1), 100
    everyone = range(len(rows))
    of_seed = np.random.default_rng(0)
    x, y = (of_seed.normal(size=(num_steps, sum(rows), width)).astype(np.float32) for width in (4, 2))
    first = {
        "w": jnp.asarray(of_seed.normal(size=(4, 2)), jnp.float32),
        "b": jnp.zeros(2),
        "seed": jnp.int32(7),
    }

    def loss(w, b, x, y):
        return jnp.mean((jnp.tanh(x @ w + b) - y) ** 2)

    @jax.jit
    def trained(params, x, y):
        w, b = jax.grad(loss, argnums=(0, 1))(params["w"], params["b"], x, y)
        return {"w": params["w"] - 0.1 * w, "b": params["b"] - 0.1 * b, "seed": params["seed"] + 1}

    def train(number, attached):
        cut = slice(sum(rows[:number]), sum(rows[: number + 1]))
        params = attached[number]
        for step in range(num_steps):
            params = trained(params, x[step, cut], y[step, cut])
            groups[number].step(params, tokens=rows[number])
            params = groups[number].wait(WAIT_S)
        return groups[number].finish(WAIT_S)

    groups = [
        group(number, len(rows), every=1, quorum=len(rows), fragments=2, log=tmp_path / f"{number}.log")
        for number in everyone
    ]
    attached = [each.attach({**first, "w": first["w"] + number}) for number, each in enumerate(groups)]
    results = together(*(lambda number=number: train(number, attached) for number in everyone))
    expected = first
    for step in range(num_steps):
        expected = trained(expected, x[step], y[step])
    largest = max(np.abs(expected[name]).max() for name in "wb")
    for result in results:
        for name in "wb":
            np.testing.assert_allclose(result[name], expected[name], rtol=0, atol=1e-6 * largest)
        assert result["seed"] == 7 + num_steps  # integers stay in the group
    assert groups[0].version == num_steps
    for number in everyone:
        (logged,) = read_replay_file(tmp_path / f"{number}.log")
        assert (logged.header["group"], logged.header["every"]) == (number, 1)
        of_first = [record for record in logged.records if not record.fragment]
        taken = [record.step for record in of_first if record.kind is ReplayKind.TAKEN]
        closed = [record for record in of_first if record.kind is ReplayKind.CLOSED]
        adopted = [record for record in of_first if record.kind is ReplayKind.ADOPTED]
        assert taken[:num_steps] == [*range(1, num_steps + 1)]
        assert [record.version for record in closed] == [*range(1, num_steps + 1)]
        assert {record.rows for record in closed} == {rows}
        assert [(record.step, record.version) for record in adopted[: num_steps + 1]] == [
            (number, number) for number in range(num_steps + 1)
        ]


def keras_model(seed):
    keras.utils.set_random_seed(seed)
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(4),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
            keras.layers.Dense(1),
        ]
    )
    return model


def values_of(model):
    return [np.array(weight.value) for weight in model.weights]


@pytest.mark.rest
def test_keras_models_on_several_devices_begin_alike_and_end_with_the_mean_by_rows(group):
    strategies = [rx.MirroredStrategy(["cpu:0", "cpu:1"]), rx.OneDeviceStrategy("cpu:2")]
    models = []
    for seed, strategy in enumerate(strategies):
        with strategy.scope():
            models.append(keras_model(seed))
    groups = [group(number, 2, every=4, fragments=2, compression=None) for number in range(2)]
    for each, model in zip(groups, models, strict=True):
        assert each.attach(model) is model
    first = values_of(models[0])
    for one, other in zip(first, values_of(models[1]), strict=True):
        np.testing.assert_array_equal(one, other)
    for each, model, step, rows in zip(groups, models, (1.0, -3.0), (3, 1), strict=True):
        for weight in model.weights:
            weight.assign_add(jnp.full(weight.shape, step))
        assert each.step(tokens=rows) is None
    with groups[0].outer() as model:
        np.testing.assert_array_equal(values_of(model)[0], first[0])
    np.testing.assert_array_equal(values_of(models[0])[0], first[0] + 1)
    finished(groups)
    for model in models:
        for after, before in zip(values_of(model), first, strict=True):
            np.testing.assert_allclose(after, before + (3 * 1 - 1 * 3) / 4, atol=1e-6)
    assert "bytes_out" in groups[0].statistics()


def test_nnx_models_and_variables_are_assigned_and_one_group_stops_all(group):
    groups = [group(number, 2, every=1, compression="int8", quorum=2) for number in range(2)]
    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    variables = [rx.Variable(jnp.zeros((2,)), name="bias"), rx.Variable(jnp.zeros((3, 2)), name="kernel")]
    groups[0].attach(model)
    groups[1].attach(variables)
    np.testing.assert_array_equal(variables[1], model.kernel[...])
    variables[0].assign_add([2.0, 4.0])
    groups[0].step(tokens=1)
    groups[1].step(tokens=1)
    groups[1].stop()
    assert groups[1].should_stop
    finished(groups)
    assert groups[0].should_stop
    np.testing.assert_array_equal(model.bias[...], [1.0, 2.0])
    again = group(0, 2)  # the next job on these servers begins anew
    assert again.attach({"w": jnp.ones(3)})["w"].tolist() == [1.0, 1.0, 1.0]
    assert not again.should_stop


def test_group_that_comes_after_a_stop_says_why_it_ends_at_once(group, caplog):
    options = {"every": 1, "patience_s": 0.0, "grace_s": 0.0}
    one = group(0, 2, **options)
    one.attach({"w": jnp.zeros(3)})
    one.stop()
    one.step({"w": jnp.ones(3)}, tokens=1)
    one.wait(WAIT_S)
    one.close()  # it is killed before it finishes
    again = group(0, 2, **options)
    assert not [line for line in caplog.messages if "before this process came" in line]
    again.attach({"w": jnp.zeros(3)})
    assert [
        line
        for line in caplog.messages
        if "Group 0: some group called groups.stop() before this process came" in line
    ]
    assert again.should_stop


@pytest.fixture
def attached(group, tmp_path):
    """Starts a syncer from the snapshot of the one before, and attaches zeros in group 0."""

    def begin(num_groups):
        server = rx.Server(
            {"ps": ["localhost:0"]}, "ps", 0, config=rx.ServerOptions(snapshot_dir=str(tmp_path))
        )
        address = server.target.removeprefix("grpc://")
        one = group(0, num_groups, syncers=address, every=1, patience_s=0.0, grace_s=0.0)
        return server, one, one.attach({"w": jnp.zeros(3)})

    return begin


def test_run_from_the_snapshot_of_one_that_was_stopped_does_not_stop(attached):
    server, one, params = attached(2)
    one.stop()
    one.step({"w": params["w"] + 1}, tokens=1)
    one.wait(WAIT_S)
    one.close()  # it is killed before it finishes
    server.close()
    server, again, params = attached(2)
    with server:
        assert params["w"].tolist() != [0.0, 0.0, 0.0]
        again.step(params, tokens=1)
        again.wait(WAIT_S)
        assert not again.should_stop


def test_next_run_from_the_snapshots_begins_with_the_parameters_at_the_end_of_the_one_before(attached):
    for done in range(2):
        server, one, params = attached(1)
        with server:
            assert params["w"].tolist() == [3.0 * done] * 3
            for _ in range(3):
                params = one.step({"w": params["w"] + 1}, tokens=1)
            assert one.finish(WAIT_S)["w"].tolist() == [3.0 * (done + 1)] * 3


def test_group_that_begins_again_at_once_does_not_join_the_session_that_ends(group, monkeypatch):
    ask_all = Syncers._ask_all

    def late(syncers, what):
        if what == "leave" and syncers._name == "group 1":
            time.sleep(0.5)
        ask_all(syncers, what)

    monkeypatch.setattr(Syncers, "_ask_all", late)
    groups, again = [group(number, 2, every=1) for number in range(2)], group(0, 2, every=1)
    for each in groups:
        each.step({"w": each.attach({"w": jnp.zeros(3)})["w"] + 1}, tokens=1)

    def finish_and_begin():
        groups[0].finish(WAIT_S)
        return again.attach({"w": jnp.full(3, 7.0)})

    begun, _ = together(finish_and_begin, lambda: groups[1].finish(WAIT_S))
    assert begun["w"].tolist() == [7.0, 7.0, 7.0]


def test_push_that_is_not_finite_is_named_with_its_group_which_adopts_the_outer_parameters(group, caplog):
    groups = [group(number, 2, every=1) for number in range(2)]
    params = [each.attach({"w": jnp.zeros(3)}) for each in groups]
    groups[0].step({"w": params[0]["w"] + jnp.nan}, tokens=5)
    groups[1].step({"w": params[1]["w"] + 2}, tokens=1)
    for result in finished(groups):
        np.testing.assert_array_equal(result["w"], np.full(3, 2.0))
    assert [line for line in caplog.messages if "Group 0: pushes 1 to 1" in line and "not finite" in line]
    assert groups[0].statistics()["lost_pushes"] == 1


def test_group_that_restarts_goes_on_with_its_data_where_its_last_push_was(group, caplog):
    strategy = rx.OneDeviceStrategy("cpu:0")

    def batches():
        data = rx.data.from_arrays(np.arange(40.0, dtype=np.float32)).shuffle(40, seed=3).batch(2)
        return iter(strategy.experimental_distribute_dataset(data))

    rows = [np.asarray(batch).tolist() for batch in batches()]

    def train(num_steps, begin):
        options = {"every": 4, "fragments": 2, "patience_s": 0.0, "grace_s": 0.0}
        groups, iterator = group(0, 2, **options), batches()
        params = groups.attach({"w": jnp.zeros(3), "b": jnp.zeros(2)}, data=iterator)
        for step in range(begin, begin + num_steps):
            assert np.asarray(next(iterator)).tolist() == rows[step]
            groups.step(params, tokens=2)
            params = groups.wait(WAIT_S)
        return groups

    train(7, 0).close()  # killed after step 7: its last push was that of the second fragment, after step 6
    with caplog.at_level("INFO", "replicax"):
        train(4, 6).close()
        train(2, 10).finish(WAIT_S)
    said = [line for line in caplog.messages if "has started again" in line]
    assert ["after 6 steps and 12 rows" in said[0], "after 10 steps and 20 rows" in said[1]] == [True, True]


def test_program_without_groups_runs_unchanged_and_says_so(monkeypatch, caplog):
    monkeypatch.delenv("REPLICAX_GROUP", raising=False)
    with caplog.at_level("INFO", "replicax"):
        groups = rx.experimental.LocalUpdates(every=2, quorum=3)
    assert [line for line in caplog.messages if "one group" in line]
    assert (groups.num_groups, groups.index) == (1, 0)
    params = groups.attach({"w": jnp.zeros(3)})
    for _ in range(3):
        params = groups.step({"w": params["w"] + 1}, tokens=2)
    with groups.outer() as outer:
        np.testing.assert_array_equal(outer["w"], np.full(3, 3.0))
    groups.stop()
    assert groups.should_stop
    np.testing.assert_array_equal(groups.finish()["w"], np.full(3, 3.0))
    with pytest.raises(ContextError, match="finish was called twice"):
        groups.finish()


def test_bad_arguments_say_what_to_write(group):
    one = group(0, 2, every=4, fragments=2)
    for options, message in [
        ({"quorum": 3}, "quorum from 1 to 2"),
        ({"every": 0}, "every=0"),
        ({"compression": "fp4"}, "'int8' or None"),
        ({"outer_optimizer": keras.optimizers.Adam()}, "Allowed are keras.optimizers.SGD"),
        ({"outer_optimizer": keras.optimizers.SGD(1.0, clipnorm=1.0)}, "clipnorm"),
        ({"grace_s": -1.0}, "grace_s"),
        ({"grace_s": "1"}, "grace_s='1'"),
        ({"patience_s": None}, "patience_s=None"),
    ]:
        with pytest.raises(InvalidArgumentError, match=message):
            group(0, 2, **options)
    with pytest.raises(InvalidArgumentError, match="fragments=1 or less"):
        one.attach({"w": jnp.zeros(2)})
    with pytest.raises(InvalidArgumentError, match=r"the class Sequential\. Attach an object"):
        one.attach(keras.Sequential)
    variable = rx.Variable(jnp.zeros(2), name="v")
    with pytest.raises(InvalidArgumentError, match="'v' twice"):
        one.attach([variable, variable])
    with pytest.raises(InvalidArgumentError, match="without floating-point values"):
        one.attach({"n": jnp.zeros(2, jnp.int32)})
    with pytest.raises(ContextError, match="nothing was attached"):
        one.step(tokens=1)
    assert outer_optimizer_of(keras.optimizers.SGD(0.5, momentum=0.25)) == OuterSgd(0.5, 0.25, False)


def test_bad_calls_say_what_to_write(group):
    groups = group(0, 1, every=4, fragments=2)
    model, strategy = nnx.Linear(3, 4, rngs=nnx.Rngs(0)), rx.OneDeviceStrategy("cpu:0")
    groups.attach(model)
    with pytest.raises(ContextError, match="attach was called before"):
        groups.attach(model)
    for tokens in (None, -1, 0.5):
        with pytest.raises(InvalidArgumentError, match=r"write groups.step\(tokens=n\)"):
            groups.step(tokens=tokens)
    with pytest.raises(InvalidArgumentError, match=r"Linear was attached, so write groups.step\(tokens=n\)"):
        groups.step({"w": jnp.zeros(2)}, tokens=1)
    with pytest.raises(InvalidArgumentError, match="Allowed are 1, 2;"):
        groups.step(tokens=1, steps=4)
    for traced in (
        jax.jit(lambda: groups.step(tokens=1)),
        lambda: strategy.run(lambda: groups.step(tokens=1)),
    ):
        with pytest.raises(TraceError, match="Call it after that function"):
            traced()
    assert groups.steps == 0
    with groups.outer(), pytest.raises(ContextError, match="inside of"):
        groups.step(tokens=1)
    groups.step(tokens=1, steps=2)
    groups.step(tokens=1, steps=2)
    model.kernel = nnx.Param(model.kernel[...])
    with pytest.raises(InvalidArgumentError, match="the model has 'kernel', which was not there"):
        groups.step(tokens=1, steps=2)
    groups.close()
    with pytest.raises(ContextError, match="close was called before"):
        groups.finish()


def test_leaf_that_is_no_longer_an_array_is_named():
    attached = AttachedArrays({"w": jnp.zeros(())})
    with pytest.raises(StructureError, match=r"got float for \['w'\], which was attached as float32"):
        attached.replace({"w": 1.0})


@pytest.mark.parametrize(
    ("options", "size", "message"),
    [
        ({}, 3, r"parameter 0 is float32\[3\].*in group 1, and float32\[2\].*in group 0"),
        ({"every": 7}, 2, "every is 7 in group 1, and 5 in group 0"),
        ({"outer_optimizer": optax.adam(0.1)}, 2, "outer_optimizer is the program"),
        ({"outer_optimizer": None}, 2, "outer_optimizer is SGD"),
    ],
)
def test_groups_that_differ_name_both_groups_and_the_first_difference(group, options, size, message):
    one, other = group(0, 2, every=5), group(1, 2, **{"every": 5, **options})
    one.attach({"w": jnp.zeros(2)})
    with pytest.raises(InvalidArgumentError, match=message):
        other.attach({"w": jnp.zeros(size)})


def test_syncer_that_does_not_answer_is_an_error_that_names_it(group, monkeypatch):
    monkeypatch.setenv("REPLICAX_START_TIMEOUT_S", "0.2")
    lonely = group(0, 2, syncers="localhost:9")
    with pytest.raises(UnavailableError, match=r"syncer 0 \(localhost:9\).*REPLICAX_SYNCERS"):
        lonely.attach({"w": jnp.zeros(2)})


@pytest.mark.parametrize(
    ("group", "syncers", "message"),
    [
        ("4/4", "localhost:1", "REPLICAX_GROUP='4/4'"),
        ("one", "localhost:1", "from 0"),
        ("0/2", "", "REPLICAX_SYNCERS is not"),
        ("0/2", "localhost:1,localhost:2,localhost:1", "has localhost:1 2 times"),
        ("", "localhost:1", "REPLICAX_GROUP is not"),
    ],
)
def test_environment_that_is_wrong_is_named(monkeypatch, group, syncers, message):
    monkeypatch.setenv("REPLICAX_GROUP", group)
    monkeypatch.setenv("REPLICAX_SYNCERS", syncers)
    with pytest.raises(ClusterEnvironmentError, match=message):
        rx.experimental.LocalUpdates()

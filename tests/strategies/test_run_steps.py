"""``strategy.run_steps`` and ``extended.experimental_run_steps_on_iterator``: the same as single steps, in one program."""

import time

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import examples

STRATEGIES = {
    "default": rx.get_strategy,
    "one device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored 2": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored 3": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]),
    "central storage": lambda: rx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"),
}


# Like the default strategy, and like three replicas.
LONG = {"one device", "mirrored 2"}


@pytest.fixture(params=[pytest.param(name, marks=[pytest.mark.long] * (name in LONG)) for name in STRATEGIES])
def strategy(request):
    return STRATEGIES[request.param]()


def regression(num_rows):
    features = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    return features, features @ np.array([1.0, 2.0, 3.0], np.float32)


class Training:
    """Linear regression; the steps go through the data in order."""

    def __init__(self, strategy, num_rows=26, batch_size=4):
        self.strategy = strategy
        with strategy.scope():
            self.weights = rx.Variable(np.zeros(3, np.float32))
            self.count = rx.Variable(0, trainable=False, aggregation="ONLY_FIRST_REPLICA")
            self.seen = rx.Variable(0.0, trainable=False, synchronization="ON_READ", aggregation="SUM")
        rows = rx.data.from_arrays(regression(num_rows)).batch(batch_size)
        self.dataset = strategy.experimental_distribute_dataset(rows)

    def step(self, batch):
        features, labels = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((features @ self.weights - labels) ** 2)
        gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, self.weights))
        self.weights.assign_sub(0.1 * gradient)
        self.count.assign_add(1)
        self.seen.assign_add(jnp.float32(labels.shape[0]))
        return {"loss": loss, "gradient": gradient, "rows": labels.shape[0] > 100, "name": "train"}

    def losses(self, results):
        """The global loss of each step."""
        return np.atleast_1d(np.asarray(self.strategy.reduce("SUM", results["loss"], axis=None)))

    def state(self):
        return self.weights.numpy(), int(self.count.numpy()), float(np.asarray(self.seen.read_value()))


def by_single_steps(training):
    return np.concatenate(
        [training.losses(training.strategy.run(training.step, args=(batch,))) for batch in training.dataset]
    )


def by_steps(training, steps):
    iterator, losses = iter(training.dataset), []
    while True:
        try:
            losses.append(training.losses(training.strategy.run_steps(training.step, iterator, steps)))
        except rx.errors.OutOfRangeError:
            return np.concatenate(losses)


@pytest.mark.parametrize("steps", [3, *(pytest.param(steps, marks=pytest.mark.rest) for steps in (1, 7, 50))])
def test_run_steps_equals_single_steps(strategy, steps):
    one, other = Training(strategy), Training(strategy)
    expected, got = by_single_steps(one), by_steps(other, steps)
    assert len(got) == 7
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    for wanted, value in zip(one.state(), other.state(), strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-6)
    assert other.state()[1:] == (7, 26.0)


@pytest.mark.rest
@examples(6, short=4)
@given(st.integers(1, 30), st.integers(1, 9), st.integers(1, 6))
def test_any_batch_sizes(num_rows, batch_size, steps):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    one, other = (Training(strategy, num_rows, batch_size) for _ in range(2))
    np.testing.assert_allclose(by_steps(other, steps), by_single_steps(one), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(other.state()[0], one.state()[0], rtol=1e-5, atol=1e-6)


def test_results_have_the_steps_in_front():
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]), num_rows=24)
    results = training.strategy.run_steps(training.step, iter(training.dataset), 6)
    assert isinstance(results["loss"], rx.PerReplica)
    assert [value.shape for value in results["loss"].values] == [(6,), (6,)]
    assert [value.shape for value in results["gradient"].values] == [(6, 3), (6, 3)]
    np.testing.assert_array_equal(*results["gradient"].values)
    assert results["rows"] is False
    assert results["name"] == "train"


def test_results_for_each_row():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(10)).batch(5))
    results = strategy.run_steps(lambda x: x * 10, iter(dataset), 2)
    assert [value.tolist() for value in results.values] == [[[0, 10, 20], [50, 60, 70]], [[30, 40], [80, 90]]]


def test_steps_that_continue_a_group_return_their_own_results():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    batches = [np.full(rows, number, np.float32) for number, rows in enumerate((4, 4, 2, 2, 2, 2))]
    iterator = iter(strategy.experimental_distribute_dataset(batches))

    def step(x):
        return jnp.sum(x), rx.get_replica_context().all_reduce("SUM", jnp.sum(x))

    # The third step begins a group of three, of which the next call takes the rest.
    for expected in ([0.0, 4.0, 4.0], [6.0, 8.0, 10.0]):
        of_replicas, of_all = strategy.run_steps(step, iterator, 3)
        assert strategy.reduce("SUM", of_replicas, axis=None).tolist() == expected
        assert np.asarray(of_all).tolist() == expected


def test_rows_of_different_batches_do_not_stack():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = rx.Variable(0)

    def step(x):
        count.assign_add(1)
        return x

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(10)).batch(4))
    with pytest.raises(rx.errors.StructureError, match="cannot be stacked"):
        strategy.run_steps(step, iter(dataset), 3)
    assert int(count.numpy()) == 3


@pytest.mark.parametrize(("num_rows", "text"), [(10, "2, 1"), (7, "PerReplica")])
def test_differing_python_numbers_raise(num_rows, text):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(num_rows)).batch(4))
    with pytest.raises(rx.errors.StructureError, match=text):
        strategy.run_steps(lambda x: x.shape[0], iter(dataset), 3)


def test_differing_structures_raise():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(6)).batch(4))
    with pytest.raises(rx.errors.StructureError, match="Return the same structure"):
        strategy.run_steps(lambda x: {"s": jnp.sum(x)} if x.shape[0] > 1 else jnp.sum(x), iter(dataset), 2)


@pytest.mark.parametrize("dtype", [">f4", ">i2", "<f4", "bool", "complex64", "uint8"])
@pytest.mark.parametrize("num_replicas", [1, 2])
def test_batches_of_any_dtype(dtype, num_replicas):
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    rows = np.arange(6).astype(dtype)
    single = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(3))
    results = strategy.run_steps(lambda x: jnp.sum(x), iter(single), 2)
    totals = (
        np.asarray(strategy.reduce("SUM", results, axis=None)) if num_replicas > 1 else np.asarray(results)
    )
    expected = [jnp.sum(jnp.asarray(rows[:3].astype(rows.dtype.newbyteorder("=")))), rows[3:].sum()]
    assert totals.tolist() == [complex(x) if "c" in dtype else x for x in map(np.asarray, expected)]
    parts = [strategy.experimental_local_results(x) for x in single]
    assert [np.asarray(p).tolist() for step in parts for p in step if p.size] == [
        part.tolist() for step in (rows[:3], rows[3:]) for part in np.array_split(step, num_replicas)
    ]


def per_replica_datasets(first, second):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    options = rx.InputOptions(experimental_replication_mode="PER_REPLICA")
    made = (first, second)
    dataset = strategy.distribute_datasets_from_function(lambda c: made[c.input_pipeline_id], options)
    return strategy, dataset


@pytest.mark.parametrize(
    ("second", "text"),
    [
        ([{"b": np.ones(2, np.float32)}], "structure"),
        ([{"a": np.ones(2, np.int32)}], "dtype"),
        ([{"a": np.ones((2, 1), np.float32)}], "rank"),
    ],
)
def test_differing_elements_of_replicas_raise_in_both_ways(second, text):
    strategy, dataset = per_replica_datasets([{"a": np.ones(2, np.float32)}], second)
    with pytest.raises(rx.errors.InvalidArgumentError, match=text):
        next(iter(dataset))
    with pytest.raises(rx.errors.InvalidArgumentError, match=text):
        strategy.run_steps(lambda x: jnp.sum(x["a"]), iter(dataset), 1)


def test_an_iterator_of_another_strategy():
    strategy, other = rx.MirroredStrategy(["cpu:0", "cpu:1"]), rx.MirroredStrategy(["cpu:2", "cpu:3"])
    dataset = other.experimental_distribute_dataset(rx.data.from_arrays(np.arange(6)).batch(4))
    with pytest.raises(rx.errors.MixedStrategiesError, match="distribute the dataset with this one"):
        strategy.run_steps(jnp.sum, iter(dataset), 2)


def test_the_mode_of_jax_may_change_between_steps():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    rows = rx.data.from_arrays(np.arange(24.0)).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    assert next(iterator).dtype == np.float32
    with jax.enable_x64(True):
        assert next(iterator).dtype == np.float64
        results = strategy.run_steps(jnp.sum, iterator, 2)
        assert results.dtype == np.float64
    results = strategy.run_steps(jnp.sum, iterator, 2)
    assert results.dtype == np.float32
    assert np.asarray(strategy.reduce("SUM", results, axis=None)).tolist() == [17, 21]


def test_only_one_group_is_read_ahead():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    read = []

    def batches():
        for number in range(100):
            read.append(number)
            yield np.full(2, number)

    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    strategy.run_steps(jnp.sum, iterator, np.int64(10))
    deadline = time.monotonic() + 60
    while len(read) < 20 and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.2)
    assert len(read) == 20


def test_a_bounded_number_of_programs():
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]), num_rows=26)
    for _ in range(3):
        by_steps(training, 4)
    # Four full batches, which one program runs in any number, and the last batch, of 2 rows.
    assert len(training.strategy.steps_runner._cache) == 2


def test_iterator_continues_after_the_steps():
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]), num_rows=24)
    iterator = iter(training.dataset)
    training.strategy.run_steps(training.step, iterator, 2)
    assert iterator.get_state()["elements"]["position"] == 2
    features, _ = next(iterator)
    np.testing.assert_array_equal(
        np.concatenate([np.asarray(v) for v in features.values]), regression(24)[0][8:12]
    )
    assert training.losses(training.strategy.run_steps(training.step, iterator, 9)).shape == (3,)
    with pytest.raises(rx.errors.OutOfRangeError, match="no further step"):
        training.strategy.run_steps(training.step, iterator, 1)


def test_arrays_in_the_closure_are_inputs():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(8.0)).batch(2).repeat())
    iterator = iter(dataset)

    def total(scale):
        return strategy.reduce(
            "SUM", strategy.run_steps(lambda x: jnp.sum(x) * scale, iterator, 4), axis=None
        )

    assert [float(jnp.sum(total(jnp.float32(scale)))) for scale in (1, 10)] == [28, 280]
    assert len(strategy.steps_runner._cache) == 1


@pytest.mark.rest
def test_keras():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def make():
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((3,)), keras.layers.Dense(4, activation="relu"), keras.layers.Dense(1)]
            )
            optimizer = keras.optimizers.Adam(0.01)
            metric = keras.metrics.MeanSquaredError()

        def step(batch):
            features, labels = batch
            with rx.GradientTape() as tape:
                predictions = model(features, training=True)[:, 0]
                loss = rx.nn.compute_average_loss((predictions - labels) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
            metric.update_state(labels, predictions)
            return loss

        return model, metric, step

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(regression(26)).batch(4))
    model, metric, step = make()
    for batch in dataset:
        strategy.run(step, args=(batch,))
    together, its_metric, its_step = make()
    strategy.run_steps(its_step, iter(dataset), 7)
    for one, other in zip(model.weights, together.weights, strict=True):
        np.testing.assert_allclose(np.asarray(other), np.asarray(one), rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(float(its_metric.result()), float(metric.result()), rtol=1e-6)


def test_function_that_raises_changes_nothing():
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]), num_rows=24)

    def broken(batch):
        training.step(batch)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        training.strategy.run_steps(broken, iter(training.dataset), 2)
    assert training.state()[1] == 0
    assert training.strategy.run_steps(training.step, iter(training.dataset), 2)["name"] == "train"


def test_error_of_the_data_comes_after_earlier_steps():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        total = rx.Variable(0.0)

    def batches():
        yield np.ones(2)
        yield np.ones(2)
        raise OSError("disk")

    def step(x):
        total.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.sum(x)))

    iterator = iter(strategy.experimental_distribute_dataset(batches()))
    with pytest.raises(OSError, match="disk"):
        strategy.run_steps(step, iterator, 10)
    assert float(total.numpy()) == 4  # the steps before it have run


@pytest.mark.parametrize(
    ("make_iterator", "steps", "text"),
    [
        (lambda dataset: dataset, 2, "Make iterator = iter\\(dataset\\) once"),
        (lambda dataset: iter([1, 2]), 2, "the iterator of a distributed dataset, got list_iterator"),
        (iter, 0, "an int of at least 1, got 0"),
        (iter, 2.0, "got 2.0"),
        (iter, True, "got True"),
    ],
)
def test_bad_arguments(make_iterator, steps, text):
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    with pytest.raises(rx.errors.InvalidArgumentError, match=text):
        training.strategy.run_steps(training.step, make_iterator(training.dataset), steps)


def test_not_inside_traced_functions():
    training = Training(rx.MirroredStrategy(["cpu:0", "cpu:1"]))
    iterator = iter(training.dataset)

    @rx.function
    def outer():
        return training.strategy.run_steps(training.step, iterator, 2)

    with pytest.raises(rx.errors.UnsupportedError, match="outside of rx"):
        outer()


# --- functional state ---------------------------------------------------------------------------------


def state_step(state, batch):
    """Gradient descent with momentum. Each replica has its own number of rows seen."""
    features, labels = batch
    loss, gradient = jax.value_and_grad(lambda w: rx.nn.compute_average_loss((features @ w - labels) ** 2))(
        state["weights"]
    )
    loss, gradient = rx.get_replica_context().all_reduce("SUM", (loss, gradient))
    velocity = 0.5 * state["velocity"] + gradient
    new = {
        "weights": state["weights"] - 0.05 * velocity,
        "velocity": velocity,
        "steps": state["steps"] + 1,
        "seen": state["seen"] + jnp.sum(labels == labels),
        "key": jax.random.split(state["key"], 1)[0],
    }
    return new, loss + 0 * jax.random.uniform(state["key"])


def initial_state():
    return {
        "weights": np.zeros(3, np.float32),
        "velocity": jnp.zeros(3),
        "steps": 0,
        "seen": 0.0,
        "key": jax.random.key(0),
    }


def total_of(strategy, value):
    return float(np.asarray(strategy.reduce("SUM", value, axis=None)))


@pytest.mark.parametrize("replicated", [True, False])
def test_functional_state_goes_from_step_to_step(strategy, replicated):
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(regression(26)).batch(4))
    state, expected = strategy.replicate(initial_state()), []
    for batch in dataset:
        state, loss = strategy.run(state_step, args=(state, batch))
        expected.append(float(loss))

    given = strategy.replicate(initial_state()) if replicated else initial_state()
    iterator, got = iter(dataset), []
    for steps in (3, 3, 1):  # seven steps, of which the last has 2 rows
        given, losses = strategy.run_steps(state_step, iterator, steps, state=given)
        got.extend(np.asarray(losses).tolist())
    np.testing.assert_allclose(got, expected, rtol=1e-6)
    for name in ("weights", "velocity"):
        np.testing.assert_allclose(np.asarray(given[name]), np.asarray(state[name]), rtol=1e-5)
    assert int(given["steps"]) == 7
    assert total_of(strategy, given["seen"]) == 26


def test_functional_state_that_is_reduced_is_proven_equal():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(regression(24)).batch(4))
    state, losses = strategy.run_steps(state_step, iter(dataset), 6, state=initial_state())
    assert [state[name].is_equal for name in ("weights", "velocity", "steps", "key")] == [True] * 4
    assert losses.is_equal
    assert not state["seen"].is_equal
    assert [float(value) for value in state["seen"].values] == [12, 12]


def test_functional_state_beside_variables():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        count = rx.Variable(0, aggregation="ONLY_FIRST_REPLICA")
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(8.0)).batch(2))

    def step(total, x):
        count.assign_add(1)
        return total + rx.get_replica_context().all_reduce("SUM", jnp.sum(x)), None

    total, nothing = strategy.run_steps(step, iter(dataset), 4, state=jnp.float32(0))
    assert (float(total), nothing, int(count.numpy())) == (28, None, 4)


def test_functional_state_that_diverges_warns(caplog):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(regression(24)).batch(4))

    def step(weights, batch):
        features, labels = batch
        return weights - 0.1 * jax.grad(lambda w: jnp.mean((features @ w - labels) ** 2))(weights), None

    weights, _ = strategy.run_steps(step, iter(dataset), 6, state=strategy.replicate(jnp.zeros(3)))
    assert "args[0] was the same on all replicas" in caplog.text
    first, second = map(np.asarray, weights.values)
    assert not np.allclose(first, second)
    with pytest.raises(rx.errors.PerReplicaUseError):
        strategy.unreplicate(weights)


@pytest.mark.parametrize(
    ("step", "text"),
    [
        (lambda state, x: state, "returns a pair"),
        (lambda state, x: ([state], None), "of the structure"),
        (lambda state, x: (state.astype("float16"), None), r"float32\[2\], but the step returned float16"),
        (lambda state, x: (state[:1], None), r"float32\[2\], but the step returned float32\[1\]"),
        (lambda state, x: (x, None), r"returned float32\[1\]"),
        (lambda state, x: ("state", None), "returned 'state'"),
    ],
)
def test_functional_state_must_keep_its_structure(step, text):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.arange(8, dtype=np.float32)).batch(2)
    )
    with pytest.raises(rx.errors.StructureError, match=text):
        strategy.run_steps(step, iter(dataset), 2, state=jnp.zeros(2))


def test_number_that_would_be_narrowed_is_not_state():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.zeros(4, np.float32)).batch(2))
    with pytest.raises(rx.errors.StructureError, match="float32"):
        strategy.run_steps(lambda state, x: (1.5, None), iter(dataset), 2, state=jnp.int32(0))
    state, _ = strategy.run_steps(lambda state, x: (1, None), iter(dataset), 2, state=jnp.float32(0))
    assert state.dtype == jnp.float32


def test_int_with_more_bits_than_jax_keeps_is_not_state():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.zeros(4, np.float32)).batch(2))
    with pytest.raises(rx.errors.NarrowingError, match=r"state\['n'\] has 10000000000\."):
        strategy.run_steps(lambda state, x: (state, None), iter(dataset), 2, state={"n": 10**10})
    with pytest.raises(rx.errors.NarrowingError, match=r"tree\['n'\] has 10000000000\."):
        strategy.replicate({"n": 10**10})


def test_functional_state_consists_of_arrays():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(8.0)).batch(2))
    with strategy.scope():
        variable = rx.Variable(0.0)
    for state in ({"name": "adam"}, {"w": variable}):
        with pytest.raises(rx.errors.InvalidArgumentError, match="state is a pytree of arrays"):
            strategy.run_steps(lambda s, x: (s, None), iter(dataset), 2, state=state)
    other = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"]).replicate(jnp.zeros(2))
    with pytest.raises(rx.errors.MixedStrategiesError, match="of 3 replicas"):
        strategy.run_steps(lambda s, x: (s, None), iter(dataset), 2, state=other)


# --- the older form -----------------------------------------------------------------------------------


@pytest.mark.rest
def test_older_form(strategy):
    one, other = Training(strategy, num_rows=24), Training(strategy, num_rows=24)
    expected = by_single_steps(one)

    def step(ctx, inputs):
        results = strategy.run(other.step, args=(inputs,))
        ctx.set_last_step_output("loss", results["loss"], reduce_op=rx.ReduceOp.SUM)
        ctx.set_last_step_output("raw", results["loss"])
        ctx.set_non_tensor_output("name", results["name"])

    iterator = iter(other.dataset)
    ctx = strategy.extended.experimental_run_steps_on_iterator(step, iterator, iterations=4)
    np.testing.assert_allclose(ctx.last_step_outputs["loss"], expected[3], rtol=1e-6)
    raw = strategy.reduce("SUM", ctx.last_step_outputs["raw"], axis=None)
    np.testing.assert_allclose(raw, expected[3], rtol=1e-6)
    assert ctx.non_tensor_outputs == {"name": "train"}
    ctx = strategy.extended.experimental_run_steps_on_iterator(
        step, iterator, 9, initial_loop_values={"loss": 0.0, "other": 5}
    )
    np.testing.assert_allclose(ctx.last_step_outputs["loss"], expected[-1], rtol=1e-6)
    assert ctx.last_step_outputs["other"] == 5
    np.testing.assert_allclose(other.state()[0], one.state()[0], rtol=1e-6)
    with pytest.raises(rx.errors.OutOfRangeError):
        strategy.extended.experimental_run_steps_on_iterator(step, iterator)


def test_step_outputs_are_set_in_cross_replica_code():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.arange(4.0)).batch(2))

    def step(ctx, inputs):
        strategy.run(lambda x: ctx.set_last_step_output("x", jax.numpy.sum(x)), args=(inputs,))

    with pytest.raises(rx.errors.CrossReplicaContextError, match="Return the value from that function"):
        strategy.extended.experimental_run_steps_on_iterator(step, iter(dataset))

"""``rx.function``: cross-replica code in one program: arguments, closures, methods, state, loops, errors."""

import functools
import logging
import traceback

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import message, tpu_strategy
from replicax import errors

STRATEGIES = {
    "default": rx.get_strategy,
    "mirrored": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
    "tpu": lambda: tpu_strategy(num_replicas=2, num_logical_devices=2),
}


@pytest.fixture(params=STRATEGIES)
def strategy(request):
    return STRATEGIES[request.param]()


@pytest.fixture
def two():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def per_replica(strategy, *rows):
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.asarray(rows[context.replica_id_in_sync_group], np.float32)
    )


def local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


# --- as a decorator -----------------------------------------------------------------------------------


def test_it_keeps_the_functions_name_and_docstring():
    @rx.function
    def step(x):
        """Adds one."""
        return x + 1

    assert (step.__name__, step.__doc__) == ("step", "Adds one.")
    assert "step" in repr(step)
    assert step.python_function(1) == 2
    assert float(step(1.0)) == 2.0


def test_options_of_tensorflow_are_accepted():
    @rx.function(
        input_signature=[None],
        autograph=False,
        jit_compile=True,
        reduce_retracing=True,
        experimental_follow_type_hints=1,
    )
    def step(x):
        return x * 2

    assert step(jnp.ones(2)).tolist() == [2.0, 2.0]
    assert float(rx.function(lambda x: x, input_signature=None)(1.0)) == 1.0


def test_unsupported_arguments():
    with pytest.raises(errors.InvalidArgumentError, match=r"'jit'.*input_signature"):
        rx.function(jit=True)
    with pytest.raises(errors.InvalidArgumentError, match="decorates a function, got 3"):
        rx.function(3)


def test_methods(strategy):
    with strategy.scope():
        total = rx.Variable(0.0)

    class Trainer:
        def __init__(self, scale):
            self.scale = scale

        @rx.function
        def step(self, x):
            total.assign_add(x * self.scale)
            return total.value

    first, second = Trainer(1.0), Trainer(10.0)
    assert [float(first.step(2.0)), float(second.step(2.0)), float(first.step(2.0))] == [2.0, 22.0, 24.0]
    assert Trainer.step.python_function.__name__ == "step"


def yielding(x):
    yield x


async def waiting(x):
    return x


@pytest.mark.filterwarnings("ignore:Python iterable type 'generator' is treated as a leaf:DeprecationWarning")
@pytest.mark.parametrize(
    ("fn", "says"),
    [
        (yielding, ("a generator (yield), yielding", "its body has not been run")),
        (waiting, ("a coroutine (async def), waiting", "its body has not been run")),
        (lambda x: {"name": np.array(["a"])}, ("ndarray of dtype <U1", "Return a str or a list")),
        (lambda x: np.datetime64("2026-01-01"), ("datetime64 of dtype datetime64[D]",)),
    ],
    ids=["generator", "coroutine", "text", "date"],
)
def test_unsupported_results_raise(strategy, fn, says):
    x = np.float32(1.0)
    for call in (
        lambda: strategy.run(fn, (x,)),
        lambda: rx.function(fn)(x),
    ):
        message(errors.UnsupportedError, call, *says)
    kept = {"name": "a", "list": ["b"]}
    assert strategy.run(lambda x: kept, (x,)) == kept


class Doubling:
    def __init__(self, scale):
        self.scale = scale

    @rx.function
    def step(self, x):
        return x * self.scale

    @classmethod
    @rx.function
    def of_class(cls, x):
        return cls(2.0).step(x)


def logged(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args) + 100.0

    return wrapper


class Logged:
    """A decorator that is an object."""

    def __init__(self, fn):
        functools.update_wrapper(self, fn)

    def __call__(self, *args):
        return self.__wrapped__(*args) + 100.0


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (Doubling(2.0).step, 6.0),
        (Doubling.of_class, 6.0),
        (logged(rx.function(lambda x: x * 2.0)), 106.0),
        (Logged(rx.function(lambda x: x * 2.0)), 106.0),
    ],
    ids=["method", "classmethod", "decorated", "in an object"],
)
def test_strategies_run_a_method_and_its_surrounding_code(strategy, fn, expected):
    assert local(strategy, strategy.run(fn, (jnp.float32(3.0),)))[0] == expected


def test_arguments(strategy):
    count = []

    @rx.function
    def step(x, *rest, flag, scale=2.0, pytree=None):
        count.append(1)
        return x * scale + sum(rest) + (pytree["a"][0] if pytree else 0) if flag else None

    one = jnp.ones(2)
    assert step(one, flag=True).tolist() == [2.0, 2.0]
    assert step(one, one, one, flag=True, scale=3.0, pytree={"a": [one, None]}).tolist() == [6.0, 6.0]
    assert step(one, flag=False) is None
    assert step(one * 5, flag=True).tolist() == [10.0, 10.0]
    assert len(count) == 3


def test_numbers_that_change_each_call_are_inputs_in_the_end():
    count = []

    @rx.function
    def step(rate):
        count.append(1)
        return jnp.float32(1) * rate

    assert [round(float(step(0.1 * i)), 3) for i in range(1, 8)] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]
    assert len(count) == 2


def test_closures_are_inputs_and_globals_are_seen(strategy):
    results = []
    for i in range(4):
        offset = jnp.float32(i)
        results.append(float(rx.function(lambda x: x + offset)(1.0)))  # noqa: B023
    assert results == [1.0, 2.0, 3.0, 4.0]

    count = []
    scale = jnp.ones(2)

    @rx.function
    def step(x):
        count.append(1)
        return x * scale

    assert step(2.0).tolist() == [2.0, 2.0]
    scale = scale * 3  # the cell holds another array now
    assert step(2.0).tolist() == [6.0, 6.0]
    assert len(count) == 1


def test_structures_and_python_values_come_back(strategy):
    model = object()

    @rx.function
    def step(x):
        return {"x": [x, (None, 3)], "s": "text", "o": model, "n": np.ones(1)}, x.shape, True

    result, shape, flag = step(jnp.ones((2, 3)))
    assert result["x"][1] == (None, 3)
    assert (result["s"], result["o"], shape, flag) == ("text", model, (2, 3), True)
    assert isinstance(result["n"], jax.Array)
    assert rx.function(lambda: None)() is None


def test_per_replica_values_in_and_out(two):
    values = per_replica(two, [1.0, 2.0], [3.0, 4.0])
    doubled, same, pytree = rx.function(
        lambda v: (two.run(lambda x: x * 2, (v["v"],)), v["v"], {"n": two.run(lambda: jnp.float32(7))})
    )({"v": values})
    assert local(two, doubled) == [[2.0, 4.0], [6.0, 8.0]]
    assert local(two, same) == [[1.0, 2.0], [3.0, 4.0]]
    assert local(two, pytree["n"]) == [7.0, 7.0]
    assert local(two, two.run(lambda x: x + 1, (doubled,))) == [[3.0, 5.0], [7.0, 9.0]]


def test_ragged_values_in_and_out(two):
    ragged = per_replica(two, [1.0, 2.0, 3.0], [4.0, 5.0])

    @rx.function
    def step(v):
        squares = two.run(lambda x: x * x, (v,))
        return two.reduce("MEAN", v, axis=0), two.gather(squares, axis=0), squares

    mean, rows, squares = step(ragged)
    assert float(mean) == 3.0
    assert rows.tolist() == [1.0, 4.0, 9.0, 16.0, 25.0]
    assert local(two, squares) == [[1.0, 4.0, 9.0], [16.0, 25.0]]


def test_replicated_state_in_and_out(two):
    state = two.replicate({"w": np.ones(2, np.float32)})
    step = rx.function(lambda s, x: two.run(lambda s, x: {"w": s["w"] + x}, (s, x)))
    for _ in range(3):
        state = step(state, 2.0)
    assert two.unreplicate(state)["w"].tolist() == [7.0, 7.0]


# --- state --------------------------------------------------------------------------------------------


def test_everything_at_once(strategy):
    num_replicas = strategy.num_replicas_in_sync
    with strategy.scope():
        v = rx.Variable(1.0)
        on_read = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        kernel = keras.Variable(np.ones(2, np.float32))
    order = []

    def merge(merged, x):
        order.append("merge")
        return merged.reduce("SUM", x, axis=None)

    def replica(x):
        order.append("replica")
        on_read.assign_add(jnp.sum(x))
        total = rx.get_replica_context().merge_call(merge, (jnp.sum(x),))
        kernel.assign(kernel + total)
        return x * v, total

    @rx.function
    def step(x):
        order.append("before")
        v.assign_add(1.0)
        scaled, totals = strategy.run(replica, (x,))
        v.assign_sub(strategy.reduce("MEAN", totals, axis=None))
        strategy.run(lambda: v.assign_add(0.5))
        gathered = strategy.gather(scaled, axis=0)
        return gathered, v.value, on_read.value, kernel + 0

    rows = [np.ones(2, np.float32) * (r + 1) for r in range(num_replicas)]
    x = per_replica(strategy, *rows)
    total, state = sum(r.sum() for r in rows), [1.0, 0.0, np.ones(2)]
    for _ in range(3):
        gathered, value, counted, weights = step(x)
        state[0] += 1
        np.testing.assert_allclose(gathered, np.concatenate(rows) * state[0])
        state[0] += 0.5 - total
        state[1] += total
        state[2] = state[2] + total
        np.testing.assert_allclose([float(value), float(counted)], state[:2])
        np.testing.assert_allclose(np.asarray(weights), state[2])
    np.testing.assert_allclose([float(v.value), float(on_read.value)], state[:2])
    np.testing.assert_allclose(np.asarray(kernel.value), state[2])
    assert order == ["before", "replica", "merge"]  # traced once


def test_metrics_and_optimizers_outside_run(strategy):
    with strategy.scope():
        metric = keras.metrics.Mean()
        kernel = keras.Variable(np.ones(2, np.float32))
        optimizer = keras.optimizers.SGD(0.5)
    x = per_replica(strategy, *[[r + 1.0] for r in range(strategy.num_replicas_in_sync)])

    @rx.function
    def step(x):
        strategy.run(lambda x: metric.update_state(x), (x,))
        optimizer.apply([jnp.ones(2)], [kernel])
        result = metric.result()
        return result

    n = strategy.num_replicas_in_sync
    assert float(step(x)) == (n + 1) / 2
    metric.reset_state()
    assert float(step(x)) == (n + 1) / 2
    assert np.asarray(kernel.value).tolist() == [0.0, 0.0]
    assert float(metric.total.value) == n * (n + 1) / 2


def test_reset_inside_a_function(strategy):
    with strategy.scope():
        metric = keras.metrics.Sum()

    @rx.function
    def epoch():
        metric.reset_state()
        for _ in range(3):
            strategy.run(lambda: metric.update_state(2.0))
        return metric.result()

    assert [float(epoch()), float(epoch())] == [6.0 * strategy.num_replicas_in_sync] * 2


def test_gradients_of_cross_replica_code(strategy):
    with strategy.scope():
        w = rx.Variable([1.0, 2.0])

    @rx.function
    def step(x):
        with rx.GradientTape() as tape:
            loss = jnp.sum(w * w * x)
        return tape.gradient(loss, w)

    assert np.asarray(step(3.0)).tolist() == [6.0, 12.0]


def test_nested_functions(strategy):
    with strategy.scope():
        v = rx.Variable(0.0)

    @rx.function
    def inner(x):
        v.assign_add(x)
        return x * 2

    @rx.function
    def outer(x):
        a = inner(x)
        b = strategy.run(lambda y: inner_of_replica(y), (x,))
        return a + strategy.reduce("MEAN", b, axis=None)

    @rx.function
    def inner_of_replica(y):
        return y + 1

    assert float(outer(jnp.float32(3))) == 10.0
    assert float(v.value) == 3.0
    assert float(inner(jnp.float32(1))) == 2.0
    assert float(v.value) == 4.0


def test_inside_a_scope(strategy):
    default = rx.get_strategy()

    @rx.function
    def step():
        return rx.get_strategy().num_replicas_in_sync, rx.in_cross_replica_context()

    assert step() == (1, False)
    with strategy.scope():
        assert step() == (strategy.num_replicas_in_sync, strategy is not default)
    assert step() == (1, False)


def test_variables_that_are_made_when_first_called(strategy):
    made = []

    @rx.function
    def step(x):
        if not made:
            made.append(rx.Variable(5.0))
        made[0].assign_add(x)
        return made[0].value

    with strategy.scope():
        assert [float(step(1.0)), float(step(1.0))] == [6.0, 7.0]
    assert made[0].distribute_strategy is strategy


# --- loops over datasets ------------------------------------------------------------------------------


def test_a_loop_over_a_dataset_runs_as_python(two, caplog):
    dataset = two.experimental_distribute_dataset(
        [np.arange(4.0, dtype=np.float32), np.arange(3.0, dtype=np.float32)]
    )
    with two.scope():
        v = rx.Variable(0.0)
    calls = []

    def replica(x):
        calls.append(1)
        v.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.sum(x)))
        return jnp.sum(x)

    @rx.function
    def epoch(data):
        total, count = 0.0, 0
        for batch in data:
            total += two.reduce("SUM", two.run(replica, (batch,)), axis=None)
            count += 1
        return total, count

    with caplog.at_level(logging.INFO, logger="replicax"):
        results = [epoch(dataset) for _ in range(3)]
    assert [(float(total), count) for total, count in results] == [(9.0, 2)] * 3
    assert float(v.value) == 27.0
    lines = [r.getMessage() for r in caplog.records if "loops over a distributed dataset" in r.getMessage()]
    assert len(lines) == 1
    assert "epoch" in lines[0]
    assert (
        len(calls) <= 4
    )  # each run is compiled: once for the even batch, and for the uneven one's two sizes


def test_a_loop_over_a_dataset_in_the_closure(two, caplog):
    dataset = two.experimental_distribute_dataset([np.arange(4.0, dtype=np.float32)] * 2)
    before = []

    @rx.function
    def epoch(scale):
        before.append(type(scale).__name__)
        return [float(two.reduce("SUM", b, axis=0)) * scale for b in dataset]

    with caplog.at_level(logging.INFO, logger="replicax"):
        assert epoch(2.0) == [12.0, 12.0]
        assert epoch(2.0) == [12.0, 12.0]
    assert sum("loops over" in r.getMessage() for r in caplog.records) == 1


def test_state_is_unchanged_if_a_loop_is_found_late(two):
    dataset = two.experimental_distribute_dataset([np.ones(2, np.float32)])
    with two.scope():
        v = rx.Variable(0.0)

    @rx.function
    def epoch():
        v.assign_add(1.0)  # before the loop is met, while tracing: must not count twice
        for batch in dataset:
            v.assign_add(two.reduce("SUM", batch, axis=0))

    epoch()
    assert float(v.value) == 3.0
    epoch()
    assert float(v.value) == 6.0


def test_an_iterator_as_an_argument(two):
    iterator = iter(two.experimental_distribute_dataset([np.ones(2, np.float32)] * 3))

    @rx.function
    def steps(it):
        return float(two.reduce("SUM", next(it), axis=0)) + float(two.reduce("SUM", it.get_next(), axis=0))

    assert steps(iterator) == 4.0
    assert float(two.reduce("SUM", next(iterator), axis=0)) == 2.0


# --- errors -------------------------------------------------------------------------------------------


def test_two_strategies_in_one_function(two):
    three = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    with two.scope():
        v = rx.Variable(1.0)
    with three.scope():
        w = rx.Variable(1.0)
        k = keras.Variable(1.0)
    for step in (
        lambda: v + w,
        lambda: v + k,
        lambda: two.run(lambda: 1) + three.run(lambda: 1),
        lambda: v.assign_add(float(three.run(lambda: 1))),
    ):
        with pytest.raises(errors.MixedStrategiesError) as caught:
            rx.function(step)()
        assert repr(two) in str(caught.value)
        assert repr(three) in str(caught.value)
    assert (float(v.value), float(w.value)) == (1.0, 1.0)
    assert float(rx.function(lambda: w + k)()) == 2.0


def test_variables_made_outside_work_with_any_strategy(two):
    outside = rx.Variable(1.0)
    with two.scope():
        v = rx.Variable(1.0)
    for order in (lambda: v + outside, lambda: outside + v):
        assert float(rx.function(order)()) == 2.0
    rx.function(lambda: outside.assign_add(v))()
    assert float(outside.value) == 2.0


def test_exceptions_inside(strategy):
    with strategy.scope():
        v = rx.Variable(1.0)
    fail = [True]

    class Mine(Exception):
        pass

    @rx.function
    def step(x):
        v.assign_add(x)
        if fail:
            raise Mine("here")
        return x

    with pytest.raises(Mine, match="here") as caught:
        step(1.0)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "step"
    assert float(v.value) == 1.0
    assert not rx.in_cross_replica_context()
    fail.clear()
    step(1.0)
    assert float(v.value) == 2.0


def test_python_needs_a_value(strategy):
    @rx.function
    def step(x):
        if x > 0:
            return x
        return -x

    with pytest.raises(errors.TracedConditionError) as caught:
        step(jnp.float32(1))
    line = step.python_function.__code__.co_firstlineno + 2
    assert f"{__file__}:{line} in step" in str(caught.value)
    assert "eager=True" not in str(caught.value)  # which is for functions that strategy.run runs


def test_replica_context_calls_in_cross_replica_code(two):
    with two.scope(), pytest.raises(errors.ReplicaContextError, match=r"strategy\.run"):
        rx.function(lambda: rx.nn.compute_average_loss(jnp.ones(2)))()


def test_per_replica_value_is_not_a_number_inside(two):
    values = per_replica(two, 1.0, 2.0)
    for use in (lambda v: v + 1, lambda v: jnp.sum(v), lambda v: v[0]):
        with pytest.raises(errors.PerReplicaUseError, match=r"strategy\.reduce"):
            rx.function(use)(values)


def test_arrays_that_leaked_out(strategy):
    kept = []
    rx.function(lambda x: kept.append(x * 2))(jnp.float32(1))
    for use in (lambda: strategy.run(lambda: kept[0] + 1), rx.function(lambda: kept[0] + 1)):
        with pytest.raises(errors.TraceError, match="which has ended"):
            use()


@pytest.mark.parametrize("num_rows", [6, 5, 2])
@pytest.mark.parametrize("is_closed_over", [False, True])
def test_code_on_a_strategys_values_runs_on_their_devices(num_rows, is_closed_over):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])
    (batch,) = strategy.experimental_distribute_dataset([(np.ones((num_rows, 2)), np.arange(num_rows))])

    def halved(batch):
        return jax.tree.map(lambda a: a / 2, batch)

    result = rx.function(lambda: halved(batch))() if is_closed_over else rx.function(halved)(batch)
    parts = strategy.experimental_local_results(result[1])
    assert np.concatenate(parts).tolist() == [row / 2 for row in range(num_rows)]
    assert float(strategy.reduce("SUM", result[1], axis=0)) == sum(range(num_rows)) / 2
    assert strategy.gather(result[0], axis=0).shape == (num_rows, 2)
    same = rx.function(lambda value: value)(strategy.replicate(np.ones(2)))
    assert len(same.values) == 3

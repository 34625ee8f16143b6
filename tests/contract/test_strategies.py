"""Every promise of a strategy, for every strategy: programs may rely on these wherever they run."""

import copy
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import tpu_strategy
from replicax import errors
from replicax.cluster_resolver import TPUClusterResolver

STRATEGIES = {
    "default": rx.get_strategy,
    "one_device": lambda: rx.OneDeviceStrategy("cpu:1"),
    "mirrored_2": lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "mirrored_3": lambda: rx.MirroredStrategy(["cpu:1", "cpu:2", "cpu:3"]),
    "mirrored_4": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in (3, 2, 1, 0)]),
    "central_storage_2": lambda: rx.CentralStorageStrategy(["cpu:1", "cpu:2"]),
    "tpu_2x2": lambda: tpu_strategy(num_replicas=2, num_logical_devices=2),
}
NUM_REPLICAS = {
    "default": 1,
    "one_device": 1,
    "mirrored_2": 2,
    "mirrored_3": 3,
    "mirrored_4": 4,
    "central_storage_2": 2,
    "tpu_2x2": 2,
}


# central_storage_2 and tpu_2x2 also have two replicas, and mirrored_3 and mirrored_4 are mirrored too.
LONG = {"mirrored_2"}
REST = {"mirrored_4"}


def marks_of(name):
    return [pytest.mark.long] * (name in LONG) + [pytest.mark.rest] * (name in REST)


@pytest.fixture(params=[pytest.param(name, marks=marks_of(name)) for name in STRATEGIES], scope="module")
def named(request):
    return request.param, STRATEGIES[request.param]()


@pytest.fixture
def strategy(named):
    return named[1]


@pytest.fixture
def num_replicas(named):
    return NUM_REPLICAS[named[0]]


def per_replica(strategy, fn):
    """The value of fn(r) on replica r, as an array."""
    return strategy.experimental_distribute_values_from_function(
        lambda context: np.asarray(fn(context.replica_id_in_sync_group))
    )


def local(strategy, value):
    return [np.asarray(v).tolist() for v in strategy.experimental_local_results(value)]


def replica_id():
    return rx.get_replica_context().replica_id_in_sync_group


# --- scope and contexts -------------------------------------------------------------------------------


def test_scope_makes_the_strategy_current(strategy):
    default = rx.get_strategy()
    is_other = strategy is not default  # the default strategy's scope changes nothing, as in TensorFlow
    with strategy.scope() as entered:
        assert entered is strategy
        assert rx.get_strategy() is strategy
        assert (rx.get_replica_context() is None) == is_other
        assert rx.in_cross_replica_context() == is_other
        assert rx.has_strategy() == is_other
    assert rx.get_strategy() is default
    assert not rx.in_cross_replica_context()


def test_scope_pytrees_in_itself_and_can_be_entered_again(strategy):
    scope = strategy.scope()
    with scope, strategy.scope(), strategy.scope():
        assert rx.get_strategy() is strategy
        strategy.run(lambda: None)
        assert rx.get_strategy() is strategy
    with scope:
        assert rx.get_strategy() is strategy
    assert not rx.has_strategy()


def test_scope_is_left_by_an_exception(strategy):
    with pytest.raises(KeyError), strategy.scope():
        raise KeyError("mine")
    assert not rx.has_strategy()
    assert not rx.in_cross_replica_context()


def test_a_new_thread_sees_no_scope(strategy):
    seen = []

    def look():
        seen.append((rx.has_strategy(), rx.in_cross_replica_context(), rx.get_replica_context() is None))
        with strategy.scope():
            seen.append(rx.get_strategy() is strategy)

    with strategy.scope():
        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        assert rx.get_strategy() is strategy
    assert seen == [(False, False, False), True]


def test_threads_run_side_by_side(strategy, num_replicas):
    results = {}

    def work(number):
        def step(x):
            return rx.get_replica_context().all_reduce("SUM", x * number)

        for _ in range(5):
            results[number] = local(strategy, strategy.run(step, (jnp.float32(1),)))[0]

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {n: n * num_replicas for n in range(1, 5)}


def test_replica_context_inside_run(strategy, num_replicas):
    def look():
        context = rx.get_replica_context()
        assert rx.get_strategy() is strategy
        assert not rx.in_cross_replica_context()
        assert context.strategy is strategy
        assert context.num_replicas_in_sync == num_replicas
        return context.replica_id_in_sync_group, context.num_replicas_in_sync

    ids, count = strategy.run(look)
    assert local(strategy, ids) == list(range(num_replicas))
    assert count == num_replicas
    assert strategy.num_replicas_in_sync == num_replicas


def worker_devices(strategy):
    """The devices that replicas compute on; the default strategy has JAX's, and raises an error when asked, as in
    TensorFlow."""
    if strategy is rx.get_strategy():
        for name in ("worker_devices", "parameter_devices"):
            with pytest.raises(RuntimeError, match="default strategy"):
                getattr(strategy.extended, name)
        return tuple(jax.local_devices()[:1])
    return strategy.extended.worker_devices


def test_replicas_run_on_the_worker_devices(strategy):
    devices = worker_devices(strategy)
    values = strategy.run(lambda: replica_id() + 0)
    values = values if isinstance(values, jax.Array) else values.array
    shards = sorted(values.addressable_shards, key=lambda shard: int(np.asarray(shard.data).ravel()[0]))
    firsts = [shard for shard in shards if shard.replica_id == 0]  # of the logical devices of a replica
    assert tuple(shard.device for shard in firsts) == devices
    if strategy is not rx.get_strategy():
        assert strategy.run(lambda: rx.get_replica_context().devices) == devices


# --- run ----------------------------------------------------------------------------------------------


def test_run_gives_each_replica_its_own_component(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.arange(3.0) + 10 * r)
    result = strategy.run(lambda x, y: x + y, (values,), {"y": 1.0})
    assert local(strategy, result) == [[1 + 10 * r, 2 + 10 * r, 3 + 10 * r] for r in range(num_replicas)]


def test_run_passes_plain_values_to_all(strategy, num_replicas):
    result = strategy.run(lambda x, n: x**n, (4.0, 2))
    assert result == 16.0  # Python numbers stay what they are
    result = strategy.run(lambda x: x * x, (jnp.float32(4),))
    assert local(strategy, result) == [16.0] * num_replicas
    assert isinstance(result, rx.PerReplica) == (num_replicas > 1)


def test_run_returns_python_values_bare(strategy):
    model = object()
    returned = strategy.run(lambda: {"none": None, "seven": 7, "text": "x", "yes": True, "object": [model]})
    assert returned == {"none": None, "seven": 7, "text": "x", "yes": True, "object": [model]}
    assert strategy.run(lambda: None) is None


def test_run_keeps_structure(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.float32(r))
    result = strategy.run(lambda x: [{"a": x - 1, "b": (x + 1, None)}], (values,))
    assert local(strategy, result[0]["a"]) == [r - 1 for r in range(num_replicas)]
    assert local(strategy, result[0]["b"][0]) == [r + 1 for r in range(num_replicas)]
    assert result[0]["b"][1] is None


def test_run_takes_nested_arguments(strategy, num_replicas):
    batch = {"x": per_replica(strategy, lambda r: np.float32(r)), "y": [jnp.float32(5), 2]}
    result = strategy.run(lambda b: b["x"] * b["y"][0] * b["y"][1], (batch,))
    assert local(strategy, result) == [10.0 * r for r in range(num_replicas)]


def test_run_traces_once_for_all_replicas(strategy):
    calls = []

    def step(x):
        calls.append(1)
        return x + 1

    for i in range(4):
        strategy.run(step, (jnp.float32(i),))
    assert len(calls) == 1


def test_run_inside_and_outside_scope_is_the_same(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.float32(r))
    with strategy.scope():
        inside = strategy.run(lambda x: x * 2, (values,))
    outside = strategy.run(lambda x: x * 2, (values,))
    assert local(strategy, inside) == local(strategy, outside) == [2.0 * r for r in range(num_replicas)]


# --- reduce, gather, local results --------------------------------------------------------------------


def test_reduce_over_replicas(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.arange(4.0, dtype=np.float32) + r)
    ids = sum(range(num_replicas))
    total = [num_replicas * i + ids for i in range(4)]
    assert np.asarray(strategy.reduce(rx.ReduceOp.SUM, values, axis=None)).tolist() == total
    mean = np.asarray(strategy.reduce("mean", values, axis=None))
    np.testing.assert_allclose(mean, np.array(total) / num_replicas, rtol=1e-6)


def test_reduce_over_replicas_and_batch(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.arange(4.0, dtype=np.float32).reshape(2, 2) + r)
    everything = np.concatenate([np.arange(4.0).reshape(2, 2) + r for r in range(num_replicas)])
    for axis in (0, 1, -1, (0, 1)):
        parts = np.stack([np.arange(4.0).reshape(2, 2) + r for r in range(num_replicas)])
        moved = tuple(a % 2 + 1 for a in np.atleast_1d(axis))
        np.testing.assert_allclose(strategy.reduce("SUM", values, axis=axis), parts.sum((0, *moved)))
        np.testing.assert_allclose(strategy.reduce("MEAN", values, axis=axis), parts.mean((0, *moved)))
    np.testing.assert_allclose(strategy.reduce("MEAN", values, axis=0), everything.mean(0))


@pytest.mark.parametrize("dtype", [np.float32, np.int32])
def test_reduce_of_ragged_values_counts_every_row_once(strategy, num_replicas, dtype):
    # Replica r has r + 1 rows of value r.
    values = per_replica(strategy, lambda r: np.full(r + 1, r, dtype))
    total = sum(r * (r + 1) for r in range(num_replicas))
    rows = sum(r + 1 for r in range(num_replicas))
    assert float(strategy.reduce("SUM", values, axis=0)) == total
    np.testing.assert_allclose(float(strategy.reduce("MEAN", values, axis=0)), total / rows, rtol=1e-6)


def test_reduce_with_empty_replicas(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.array([1.0, 2.0][: 2 if r == 0 else 0], np.float32))
    assert float(strategy.reduce("MEAN", values, axis=0)) == 1.5
    nothing = per_replica(strategy, lambda r: np.zeros((0,), np.float32))
    assert np.isnan(float(strategy.reduce("MEAN", nothing, axis=0)))
    assert float(strategy.reduce("SUM", nothing, axis=0)) == 0.0


def test_reduce_maps_over_pytrees(strategy, num_replicas):
    pytree = {
        "a": per_replica(strategy, lambda r: np.float32(r)),
        "b": [per_replica(strategy, lambda r: np.float32(1))],
    }
    result = strategy.reduce("SUM", pytree, axis=None)
    assert float(result["a"]) == sum(range(num_replicas))
    assert float(result["b"][0]) == num_replicas


def test_reduce_of_a_result_proven_equal(strategy, num_replicas):
    same = strategy.run(lambda: jnp.array([1.0, 2.0]))
    assert np.asarray(strategy.reduce("SUM", same, axis=None)).tolist() == [num_replicas, 2.0 * num_replicas]
    assert np.asarray(strategy.reduce("MEAN", same, axis=None)).tolist() == [1.0, 2.0]
    assert float(strategy.reduce("SUM", same, axis=0)) == 3.0 * num_replicas
    assert float(strategy.reduce("MEAN", same, axis=0)) == 1.5


def test_gather_joins_in_replica_order(strategy, num_replicas):
    rows = per_replica(strategy, lambda r: np.arange(2.0) + 10 * r)
    assert np.asarray(strategy.gather(rows, axis=0)).tolist() == [
        10 * r + i for r in range(num_replicas) for i in range(2)
    ]
    ragged = per_replica(strategy, lambda r: np.full((1, r + 1), r, np.int32))
    assert np.asarray(strategy.gather(ragged, axis=1)).tolist() == [
        [r for r in range(num_replicas) for _ in range(r + 1)]
    ]
    pytree = strategy.gather({"a": rows}, axis=-1)
    assert pytree["a"].shape == (2 * num_replicas,)


def test_local_results_have_one_entry_per_replica(strategy, num_replicas):
    values = strategy.run(lambda: {"a": replica_id() + 1, "b": 2})
    results = strategy.experimental_local_results(values)
    assert isinstance(results, tuple)
    assert len(results) == num_replicas
    assert [int(np.asarray(result["a"])) for result in results] == [r + 1 for r in range(num_replicas)]
    assert [result["b"] for result in results] == [2] * num_replicas
    assert strategy.experimental_local_results(5) == (5,)
    assert strategy.experimental_local_results([1, 2]) == ([1, 2],) * num_replicas


def test_values_from_function(strategy, num_replicas):
    seen = []

    def make(context):
        seen.append((context.replica_id_in_sync_group, context.num_replicas_in_sync))
        return {"x": np.float32(context.replica_id_in_sync_group)}

    values = strategy.experimental_distribute_values_from_function(make)
    assert seen == [(r, num_replicas) for r in range(num_replicas)]
    assert isinstance(values["x"], rx.PerReplica) == (num_replicas > 1)
    assert local(strategy, strategy.run(lambda v: v["x"] * 2, (values,))) == [
        2.0 * r for r in range(num_replicas)
    ]


@pytest.mark.parametrize("of", [np.float32, jnp.float32], ids=["numpy", "jax"])
def test_values_from_function_in_functions_and_merge_calls(strategy, num_replicas, of):
    def values(strategy, scale=1):
        return strategy.experimental_distribute_values_from_function(
            lambda context: of(context.replica_id_in_sync_group + 1) * scale
        )

    expected = [r + 1.0 for r in range(num_replicas)]
    assert local(strategy, rx.function(lambda: values(strategy))()) == expected
    doubled = rx.function(lambda: strategy.run(lambda x: x * 2, (values(strategy),)))
    assert local(strategy, doubled()) == [2 * x for x in expected]
    scaled = rx.function(lambda scale: strategy.reduce("SUM", values(strategy, scale), axis=None))
    assert float(scaled(jnp.float32(3))) == 3 * sum(expected)

    def merged(strategy):
        made = values(strategy)
        return strategy.reduce("SUM", made, axis=None), made

    total, own = strategy.run(lambda: rx.get_replica_context().merge_call(merged))
    assert local(strategy, total) == [sum(expected)] * num_replicas
    assert local(strategy, own) == expected


def in_merge_call(merge_fn):
    return rx.get_replica_context().merge_call(merge_fn)


def test_values_of_different_shapes_in_functions_and_merge_calls(strategy, num_replicas):
    def rows(strategy):
        return strategy.experimental_distribute_values_from_function(
            lambda context: np.ones(context.replica_id_in_sync_group + 1, np.float32)
        )

    in_function = rx.function(lambda: strategy.run(lambda x: x * 2, (rows(strategy),)))
    assert local(strategy, in_function()) == [[2.0] * (r + 1) for r in range(num_replicas)]
    if num_replicas == 1:
        assert local(strategy, strategy.run(in_merge_call, (rows,))) == [[1.0]]
    else:  # a program has one shape for all
        with pytest.raises(errors.UnsupportedError, match="one shape"):
            strategy.run(in_merge_call, (rows,))


@pytest.mark.parametrize("value", [np.ones(2, np.float32), jnp.ones(2)], ids=["numpy", "jax"])
@pytest.mark.parametrize("copied", ["broadcast_to", "replicate"])
def test_copies_on_all_replicas_in_functions_and_merge_calls(strategy, num_replicas, value, copied):
    def copies(strategy):
        return (
            strategy.replicate(value)
            if copied == "replicate"
            else strategy.extended.broadcast_to(value, None)
        )

    expected = [np.asarray(value).tolist()] * num_replicas
    assert local(strategy, copies(strategy)) == expected
    assert local(strategy, rx.function(lambda: copies(strategy))()) == expected
    ran = rx.function(lambda: strategy.run(lambda x: x * 2, (copies(strategy),)))
    assert local(strategy, ran()) == (2 * np.array(expected)).tolist()
    merged = strategy.run(lambda: rx.get_replica_context().merge_call(copies))
    assert local(strategy, merged) == expected


# --- collectives inside run ---------------------------------------------------------------------------


def test_all_reduce(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.arange(2.0, dtype=np.float32) + r)

    def step(x):
        context = rx.get_replica_context()
        return context.all_reduce("SUM", (x, {"n": x[0] * 0 + 1})), context.all_reduce(rx.ReduceOp.MEAN, x)

    (total, pytree), mean = strategy.run(step, (values,))
    ids = sum(range(num_replicas))
    assert local(strategy, total) == [[ids, num_replicas + ids]] * num_replicas
    assert local(strategy, pytree["n"]) == [num_replicas] * num_replicas
    np.testing.assert_allclose(
        local(strategy, mean), [[ids / num_replicas, 1 + ids / num_replicas]] * num_replicas
    )


def test_all_reduce_of_indexed_slices(strategy, num_replicas):
    def step():
        slices = rx.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
        context = rx.get_replica_context()
        return context.all_reduce("SUM", slices).to_dense(), context.all_reduce("MEAN", slices).to_dense()

    total, mean = strategy.run(step)
    assert local(strategy, total)[0] == [[num_replicas] * 2, [0, 0], [0, 0]]
    assert local(strategy, mean)[-1] == [[1, 1], [0, 0], [0, 0]]


def test_all_gather(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.full((r + 1, 1), r, np.float32))
    result = strategy.run(lambda x: rx.get_replica_context().all_gather(x, axis=0), (values,))
    rows = [[r] for r in range(num_replicas) for _ in range(r + 1)]
    assert local(strategy, result) == [rows] * num_replicas


def test_merge_call(strategy, num_replicas):
    values = per_replica(strategy, lambda r: np.float32(r))

    def merge(merged_strategy, x, text, scale):
        assert merged_strategy is strategy
        assert rx.in_cross_replica_context()
        assert rx.get_strategy() is strategy
        return merged_strategy.reduce("SUM", x, axis=None) * scale, text, x

    def step(x):
        total, text, own = rx.get_replica_context().merge_call(merge, (x, "text"), {"scale": 2})
        assert not rx.in_cross_replica_context()
        return total, text, own

    total, text, own = strategy.run(step, (values,))
    assert local(strategy, total) == [2.0 * sum(range(num_replicas))] * num_replicas
    assert text == "text"
    assert local(strategy, own) == list(range(num_replicas))


def test_merge_call_in_the_default_context():
    def merge(strategy, text):
        assert rx.in_cross_replica_context()
        assert strategy is rx.get_strategy()
        return "foo_" + text

    assert rx.get_replica_context().merge_call(merge, ("bar",)) == "foo_bar"


def test_gradient_of_all_reduce(strategy, num_replicas):
    def step(op):
        scale = (replica_id() + 1).astype(jnp.float32)
        return jax.grad(lambda x: rx.get_replica_context().all_reduce(op, x * scale))(jnp.float32(1))

    # The gradient of an all-reduce is the all-reduce of the gradients, which are 1 on every replica.
    assert local(strategy, strategy.run(step, ("SUM",))) == [
        num_replicas * (r + 1.0) for r in range(num_replicas)
    ]
    assert local(strategy, strategy.run(step, ("MEAN",))) == [r + 1.0 for r in range(num_replicas)]


# --- state --------------------------------------------------------------------------------------------


def test_variables_live_on_the_parameter_devices(strategy):
    with strategy.scope():
        v = rx.Variable(jnp.ones(2))
    assert v.distribute_strategy is strategy
    is_default = strategy is rx.get_strategy()
    devices = set(worker_devices(strategy) if is_default else strategy.extended.parameter_devices)

    def step():
        v.assign_add(jnp.ones(2))

    for _ in range(2):
        assert set(v.value.devices()) == devices
        strategy.run(step)
    assert np.asarray(v).tolist() == [3.0, 3.0]
    assert set(v.value.devices()) == devices


@pytest.mark.parametrize(
    ("aggregation", "expected"),
    [
        ("SUM", lambda n: n * (n + 1) / 2),
        ("MEAN", lambda n: (n + 1) / 2),
        ("ONLY_FIRST_REPLICA", lambda n: 1.0),
    ],
)
def test_assignments_are_aggregated(strategy, num_replicas, aggregation, expected):
    with strategy.scope():
        v = rx.Variable(10.0, aggregation=aggregation)
    strategy.run(lambda: v.assign_add(replica_id() + 1.0))
    assert float(v.value) == 10.0 + expected(num_replicas)
    assert [float(x) for x in strategy.experimental_local_results(v)] == [float(v.value)] * num_replicas


def test_components_of_on_read_variables(strategy, num_replicas):
    with strategy.scope():
        v = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    own = strategy.run(lambda: v.assign(replica_id() + 1.0))
    assert local(strategy, own) == [r + 1.0 for r in range(num_replicas)]
    assert float(v.value) == num_replicas * (num_replicas + 1) / 2


def test_keras_model_trains_alike_everywhere(strategy):
    keras = pytest.importorskip("keras")
    features = np.arange(12.0, dtype=np.float32).reshape(6, 2) / 10
    labels = features.sum(1, keepdims=True)
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1, kernel_initializer="ones")])
        optimizer = keras.optimizers.SGD(0.1)

    def step(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum((model(x) - 2 * y) ** 2, axis=1), global_batch_size=6)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    dataset = strategy.experimental_distribute_dataset([(features, labels)])
    losses = [
        float(strategy.reduce("SUM", strategy.run(step, (b,)), axis=None)) for _ in range(3) for b in dataset
    ]

    weights, bias, expected = np.ones((2, 1)), 0.0, []  # the same in NumPy
    for _ in range(3):
        error = features @ weights + bias - 2 * labels
        expected.append(float(np.mean(error**2)))
        weights, bias = weights - 0.1 * 2 * features.T @ error / 6, bias - 0.1 * 2 * error.mean()
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    np.testing.assert_allclose(model.layers[0].kernel.value, weights, rtol=1e-5)
    assert int(optimizer.iterations.value) == 3


def test_replicate_and_unreplicate(strategy, num_replicas):
    state = strategy.replicate({"w": np.ones(2, np.float32), "n": 3})
    assert isinstance(state["w"], rx.Mirrored) == (num_replicas > 1)
    options = rx.RunOptions(donate_args=(0,))

    def step(state, x):
        total = rx.get_replica_context().all_reduce("SUM", x)
        return {"w": state["w"] + total, "n": state["n"] + 1}

    for _ in range(2):
        state = strategy.run(step, (state, per_replica(strategy, lambda r: np.float32(r))), options=options)
    plain = strategy.unreplicate(state)
    assert np.asarray(plain["w"]).tolist() == [1.0 + 2 * sum(range(num_replicas))] * 2
    assert int(plain["n"]) == 5
    assert isinstance(plain["w"], jax.Array)


def test_functional_state_does_not_drift_apart_silently(strategy, num_replicas, caplog):
    """A step without ``all_reduce``: the README promises that replicas cannot diverge."""

    def step(state, x):
        gradient = jax.grad(lambda w: jnp.mean((x @ w - 1.0) ** 2))(state["w"])
        return {"w": state["w"] - 0.1 * gradient}

    def train(options, wrap):
        state = strategy.replicate({"w": np.ones(2, np.float32)})
        call = wrap(lambda state, x: strategy.run(step, (state, x), options=options))
        for _ in range(3):
            state = call(state, per_replica(strategy, lambda r: np.full((1, 2), r + 1, np.float32)))

    for wrap in (rx.function, lambda fn: fn):
        train(None, wrap)
    told = [record.getMessage() for record in caplog.records if "trains its own copy" in record.getMessage()]
    assert len(told) == (num_replicas > 1)
    assert all("args[0]['w']" in text for text in told)
    for wrap in (rx.function, lambda fn: fn):
        if num_replicas > 1:
            with pytest.raises(rx.errors.DivergenceError, match=r"args\[0\]\['w'\]"):
                train(rx.RunOptions(check_same=True), wrap)
        else:
            train(rx.RunOptions(check_same=True), wrap)


# --- data ---------------------------------------------------------------------------------------------


def test_datasets_lose_no_row(strategy, num_replicas):
    rows = np.arange(9.0, dtype=np.float32)
    for size in (1, 2, 4, 5, 9):
        dataset = strategy.experimental_distribute_dataset(
            [rows[start : start + size] for start in range(0, 9, size)]
        )
        seen = [np.asarray(strategy.gather(batch, axis=0)) for batch in dataset]
        assert np.concatenate(seen).tolist() == rows.tolist()
        sizes = [tuple(len(x) for x in strategy.experimental_local_results(batch)) for batch in dataset]
        assert all(max(s) - min(s) <= 1 and len(s) == num_replicas for s in sizes)


def test_datasets_from_function(strategy, num_replicas):
    contexts = []

    def make(context):
        contexts.append(context)
        return [np.full(2, i, np.float32) for i in range(2 * num_replicas)]

    dataset = strategy.distribute_datasets_from_function(make)
    seen = [local(strategy, batch) for batch in dataset]
    assert seen == [[[float(r + step * num_replicas)] * 2 for r in range(num_replicas)] for step in range(2)]
    assert contexts[0].num_replicas_in_sync == num_replicas
    assert contexts[0].num_input_pipelines == 1


def test_iterators_have_one_interface(strategy, num_replicas):
    rows = np.arange(3.0 * num_replicas, dtype=np.float32)
    dataset = strategy.experimental_distribute_dataset([rows[: 2 * num_replicas], rows[2 * num_replicas :]])
    from_function = strategy.distribute_datasets_from_function(lambda context: [rows] * 2 * num_replicas)
    for each in (dataset, from_function):
        total = each.reduce(0.0, lambda total, x: total + strategy.reduce("SUM", x, axis=0))
        assert float(total) == rows.sum() * (1 if each is dataset else 2 * num_replicas)
        iterator = iter(each)
        assert jax.tree.leaves(iterator.element_spec) == jax.tree.leaves(each.element_spec) != []
        first_batch = local(strategy, iterator.get_next())
        assert local(strategy, iterator.get_next_as_optional().get_value()) != []
        assert not iterator.get_next_as_optional().has_value()
        with pytest.raises(errors.OutOfRangeError):
            iterator.get_next()
        iterator.initialize()
        assert local(strategy, iterator.get_next()) == first_batch


def test_older_iterators_run(strategy, num_replicas):
    rows = np.arange(2.0 * num_replicas, dtype=np.float32)
    of_dataset = strategy.make_dataset_iterator([rows])
    of_function = strategy.make_input_fn_iterator(lambda context: [rows] * num_replicas)
    for iterator, expected in ((of_dataset, rows.sum()), (of_function, num_replicas * rows.sum())):
        for _ in range(2):
            iterator.initialize()
            sums = strategy.experimental_run(jnp.sum, iterator)
            assert float(strategy.reduce("SUM", sums, axis=None)) == expected


def all_batches(strategy, dataset):
    for batch in strategy.experimental_distribute_dataset(dataset):
        yield strategy.run(lambda batch: batch["ids"] + 0, (batch,))


def all_parts(strategy, dataset):
    for batch in strategy.distribute_datasets_from_function(lambda context: dataset):
        yield strategy.run(lambda batch: batch["ids"] + 0, (batch,))


def all_stacked(strategy, dataset):
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    yield strategy.run_steps(lambda batch: batch["ids"] + 0, iterator, steps=len(dataset))


def all_arguments(strategy, dataset):
    for batch in dataset:
        yield strategy.run(lambda batch: batch["ids"] + 0, (batch,))


def all_closed_over(strategy, dataset):
    def add_nothing(batch):
        return lambda: batch["ids"] + 0

    for batch in dataset:
        yield strategy.run(add_nothing(batch))


def all_in_functions(strategy, dataset):
    def double(batch):
        return strategy.run(lambda batch: batch["ids"] + 0, (batch,))

    yield from map(rx.function(double), dataset)


def all_eager(strategy, dataset):
    for batch in dataset:
        yield strategy.run(lambda batch: batch["ids"] + 0, (batch,), options=rx.RunOptions(eager=True))


WAYS = [all_batches, all_parts, all_stacked, all_arguments, all_closed_over, all_in_functions, all_eager]


@pytest.mark.parametrize("results_of", WAYS)
@pytest.mark.parametrize("wrong", [2**40, -(2**31) - 1, 1e300], ids=["large", "small", "float"])
def test_a_number_that_jax_would_change_is_an_error(strategy, results_of, wrong):
    dataset = [{"ids": np.array([1, 2, 3])}, {"ids": np.array([1, wrong, 5])}]
    with pytest.raises(rx.errors.NarrowingError, match="ids"):
        list(results_of(strategy, dataset))


@pytest.mark.parametrize("results_of", WAYS)
def test_numbers_of_64_bits_that_fit_are_converted(strategy, results_of):
    """It works without a warning, which pytest makes an error."""
    dataset = [{"ids": np.array([1, -(2**31), 2**31 - 1])}]
    (result,) = results_of(strategy, dataset)
    found = np.concatenate([np.ravel(part) for part in local(strategy, result)])
    assert set(found.tolist()) == {1, -(2**31), 2**31 - 1}
    (result,) = results_of(strategy, [{"ids": np.array([1.0, np.inf, 1e-300])}])
    assert np.inf in np.concatenate([np.ravel(part) for part in local(strategy, result)])


@pytest.mark.parametrize("wrong", [2**40, 1e300], ids=["int", "float"])
def test_state_that_jax_would_change_is_an_error(strategy, wrong):
    array = np.array([type(wrong)(1), wrong])
    with strategy.scope():
        v = rx.Variable(np.array([type(wrong)(1), 2]))
        ways = [
            lambda: rx.Variable(array),
            lambda: rx.Variable(lambda: array),
            lambda: v.assign(array),
            lambda: v.assign_add(array),
            lambda: strategy.replicate({"state": array}),
            lambda: strategy.extended.broadcast_to(array, None),
        ]
    for way in ways:
        with pytest.raises(rx.errors.NarrowingError, match=r"value|tree\['state'\]|tensor"):
            way()
    assert v.numpy().tolist() == [1, 2]
    v.assign(np.array([type(wrong)(3), 4]))
    assert v.numpy().tolist() == [3, 4]


def test_a_float_variable_takes_integers_of_64_bits(strategy):
    with strategy.scope():
        v = rx.Variable(np.array([2**40]), dtype="float32")
    v.assign_add(np.array([2**41]))
    assert v.numpy().tolist() == [3.0 * 2**40]


# --- inside rx.function -------------------------------------------------------------------------------


def test_complete_step_in_a_function(strategy, num_replicas):
    with strategy.scope():
        v = rx.Variable(1.0)

    @rx.function
    def step(x):
        doubled = strategy.run(lambda x: v * x * 2, (x,))
        total = strategy.reduce("SUM", doubled, axis=None)
        v.assign_add(total)
        return total, strategy.gather(strategy.run(lambda x: x[None], (x,)), axis=0), doubled

    values = per_replica(strategy, lambda r: np.float32(r + 1))
    sizes = num_replicas * (num_replicas + 1) / 2
    total, rows, doubled = step(values)
    assert float(total) == 2 * sizes
    assert np.asarray(rows).tolist() == [r + 1 for r in range(num_replicas)]
    assert local(strategy, doubled) == [2.0 * (r + 1) for r in range(num_replicas)]
    assert float(v.value) == 1 + 2 * sizes
    assert float(step(values)[0]) == 2 * sizes * (1 + 2 * sizes)


# --- what a strategy is -------------------------------------------------------------------------------


def test_a_strategy_is_copied_only_as_itself(strategy):
    assert copy.deepcopy(strategy) is strategy
    assert copy.deepcopy({"s": [strategy]})["s"][0] is strategy
    with pytest.raises(NotImplementedError, match="cannot be copied"):
        copy.copy(strategy)


def test_a_strategy_names_itself(strategy, named):
    assert "trategy" in repr(strategy)
    resolver = strategy.cluster_resolver
    assert isinstance(resolver, TPUClusterResolver) if named[0] == "tpu_2x2" else resolver is None
    assert strategy.extended.should_checkpoint


def test_there_is_one_default_strategy():
    with pytest.raises(RuntimeError, match="only one default strategy"):
        type(rx.get_strategy())()


def test_update_changes_every_copy(strategy):
    with strategy.scope():
        v = rx.Variable(5.0)
    strategy.extended.update(v, lambda v, x: v.assign(x), args=(1.0,))
    assert float(v.value) == 1.0

    def merge(strategy, x):
        mean = strategy.reduce("MEAN", x, axis=None)
        strategy.extended.update(v, lambda v, x: v.assign_add(x), args=(mean,))

    strategy.run(lambda: rx.get_replica_context().merge_call(merge, (jnp.float32(2.0),)))
    assert [float(x) for x in v.values] == [3.0] * len(v.values)
    assert strategy.extended.variable_created_in_scope(v)


# --- two strategies in one process --------------------------------------------------------------------


def test_strategies_of_different_size_take_turns(strategy):
    other = rx.MirroredStrategy([f"cpu:{i}" for i in range(5)])
    mine = strategy.experimental_distribute_dataset([np.arange(7.0, dtype=np.float32)])
    both = {}
    for name, each in (("mine", strategy), ("other", other)):
        with each.scope():
            both[name] = rx.Variable(0.0)
    plain = rx.Variable(1.0)

    def step(v, x):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        v.assign_add(total * plain)
        return total

    for _ in range(3):
        for batch in mine:
            strategy.run(step, (both["mine"], batch))
        other.run(step, (both["other"], jnp.ones(2)))
    assert float(both["mine"].value) == 3 * 21
    assert float(both["other"].value) == 3 * 10


# --- the chief ----------------------------------------------------------------------------------------


def test_one_process_is_the_chief(strategy):
    assert rx.is_chief() is True
    with strategy.scope():
        assert rx.is_chief() is True
        assert (
            local(strategy, strategy.run(lambda: jnp.asarray(rx.is_chief())))
            == [True] * strategy.num_replicas_in_sync
        )

"""Typed random keys in scheduled functions: as arguments, in closures, and as results."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax.coordinator import ClusterCoordinator
from replicax.errors import ClosureInputError
from replicax.experimental.partitioners import FixedShardsPartitioner

WAIT_S = 60
GLOBAL_KEY = jax.random.key(5)
GLOBAL_KEYS = {"many": jax.random.split(jax.random.key(6), 20_000)}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module", params=[1, 2], ids="{} devices".format)
def strategy(request):
    with in_memory_strategy(
        ps=2, devices_per_worker=request.param, partitioner=FixedShardsPartitioner(2)
    ) as strategy:
        yield strategy


@pytest.fixture(scope="module")
def run(strategy):
    """Schedules a function, and waits for its result."""
    with ClusterCoordinator(strategy) as coordinator:
        yield lambda fn, *args, **kwargs: coordinator.schedule(fn, args, kwargs).fetch(WAIT_S)


def assert_same_keys(got, expected):
    assert (got.shape, got.dtype) == (expected.shape, expected.dtype)
    assert jax.random.key_impl(got) == jax.random.key_impl(expected)
    assert (jax.random.key_data(got) == jax.random.key_data(expected)).all()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_key_is_an_argument_and_a_result(run, impl):
    key = jax.random.key(3, impl=impl)
    bits, same = run(lambda key: (jax.random.bits(key, (5,)), key), key)
    assert np.array_equal(bits, jax.random.bits(key, (5,)))
    assert_same_keys(same, key)


def test_a_function_is_traced_once_for_all_keys_of_a_kind(run):
    kinds = []

    def draw(key):
        kinds.append(jax.random.key_impl(key))
        return jax.random.bits(key)

    for impl in ("threefry2x32", "rbg"):
        for seed in range(3):
            key = jax.random.key(seed, impl=impl)
            assert run(draw, key) == jax.random.bits(key)
    assert kinds == ["threefry2x32", "rbg"]


def test_batches_of_keys_in_pytrees_of_arguments(run):
    keys = jax.random.split(jax.random.key(0), (2, 3))
    pytree = {"keys": [keys, None], "scale": np.float32(2), "name": "uniform"}

    def draw(pytree, *, key):
        assert pytree["keys"][0].shape == (2, 3)
        assert pytree["name"] == "uniform"
        draw_each = jax.vmap(jax.vmap(jax.random.uniform))
        return pytree["scale"] * draw_each(pytree["keys"][0]), {"next": [jax.random.split(key, 4), 7]}

    drawn, rest = run(draw, pytree, key=keys[0, 1])
    assert np.array_equal(drawn, 2 * jax.vmap(jax.vmap(jax.random.uniform))(keys))
    assert_same_keys(rest["next"][0], jax.random.split(keys[0, 1], 4))
    assert rest["next"][1] == 7


def test_keys_that_a_function_closes_over(run):
    key, others = jax.random.key(1), [jax.random.key(2)]

    def draw():
        keys = [key, others[0], GLOBAL_KEY, GLOBAL_KEYS["many"][7]]
        return [jax.random.bits(key) for key in keys], keys

    bits, keys = run(draw)
    expected = [key, others[0], GLOBAL_KEY, GLOBAL_KEYS["many"][7]]
    assert bits == [jax.random.bits(key) for key in expected]
    for got, one in zip(keys, expected, strict=True):
        assert_same_keys(got, one)


def test_changed_key_in_a_closure_is_used(run):
    def draw_of(key):
        return lambda: jax.random.bits(key)

    for seed in range(3):
        assert run(draw_of(jax.random.key(seed))) == jax.random.bits(jax.random.key(seed))


def test_random_numbers_can_be_assigned(strategy, run):
    with strategy.scope():
        v = rx.Variable(jnp.ones((4, 3)))

    def step(key):
        v.assign_add(jax.random.normal(key, v.shape))
        v.assign(v * jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (4, 3)))

    key = jax.random.key(4)
    run(step, key)
    expected = 1 + jax.random.normal(key, (4, 3))
    expected *= jax.random.bernoulli(jax.random.fold_in(key, 1), 0.5, (4, 3))
    np.testing.assert_allclose(v.numpy(), expected, rtol=1e-6)


def test_replicas_get_a_key_and_return_one(strategy, run):
    key, mine = jax.random.key(0), jax.random.key(8)

    def replica_fn(key):
        key = jax.random.fold_in(key, rx.get_replica_context().replica_id_in_sync_group)
        return key, jax.random.bits(key), mine, GLOBAL_KEY

    keys, bits, *others = run(lambda key: strategy.run(replica_fn, args=(key,)), key)
    for replica in range(strategy.num_replicas_in_sync):
        expected = jax.random.fold_in(key, replica)
        assert_same_keys(strategy.experimental_local_results(keys)[replica], expected)
        assert strategy.experimental_local_results(bits)[replica] == jax.random.bits(expected)
        for got, one in zip(others, (mine, GLOBAL_KEY), strict=True):
            assert_same_keys(strategy.experimental_local_results(got)[replica], one)


@pytest.mark.parametrize("where", ["argument", "closure", "global"])
def test_rows_are_looked_up_at_random(strategy, run, where):
    """The ids of lookups are computed separately, from the same key."""
    with strategy.scope():
        table = rx.Variable(np.arange(300, dtype=np.float32).reshape(100, 3))
    mine = jax.random.key(9)

    def rows(key=None):
        key = {"argument": key, "closure": mine, "global": GLOBAL_KEY}[where]
        ids = jax.random.randint(key, (5,), 0, 100)
        return jnp.take(table.value, ids, axis=0), ids

    found, ids = run(rows, *([mine] if where == "argument" else []))
    expected = jax.random.randint(GLOBAL_KEY if where == "global" else mine, (5,), 0, 100)
    assert np.array_equal(ids, expected)
    assert np.array_equal(found[:, 0], 3 * np.asarray(ids))


def test_datasets_and_per_worker_values_cannot_be_keys(strategy):
    with ClusterCoordinator(strategy) as coordinator:
        dataset = coordinator.create_per_worker_dataset(lambda: [jax.random.key(0)])
        value = coordinator.create_per_worker_value(lambda: jax.random.key(0))
        for fn, given in ((lambda i: next(i), iter(dataset)), (lambda v: v, value)):
            coordinator.schedule(fn, (given,))
            with pytest.raises(ClosureInputError, match="key_data"):
                coordinator.join(WAIT_S)

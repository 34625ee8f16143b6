"""Lookups in tables that are sharded over the replicas: the numbers of one device, and the table never moves."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close

ROWS, WIDTH = 8192, 32  # 1 MiB
CPUS = [f"cpu:{i}" for i in range(8)]
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.5),
    "adam": lambda: keras.optimizers.Adam(0.05),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
}
FIRST = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
# Rows of all shards, twice on one replica and on several ones, the first and the last row, and a negative id.
IDS = np.array([[0, 5], [5, 5], [ROWS - 1, 1023], [1024, 2], [4096, 0], [7, -1], [3000, 6000]], np.int32)
BATCHES = {"even": [IDS[:4], IDS[2:6]], "uneven": [IDS[:6], IDS[3:7], IDS[:3], IDS[:5]]}

# In the text of a compiled program: the results of a collective, and the arrays in it.
COLLECTIVE = re.compile(
    r"= (.*?) (?:all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
)
ARRAY = re.compile(r"(\w+\d+|pred)\[([\d,]*)\]")


def trained(strategy, optimizer, batches, look_up):
    """Trains a table.

    Returns:
      The variables, the losses, and the bytes of the largest collective of each step.
    """
    with strategy.scope():
        table = keras.Variable(FIRST, name="table")
        scale = keras.Variable(np.linspace(0.5, 1, WIDTH, dtype=np.float32))
        optimizer = OPTIMIZERS[optimizer]()
        optimizer.build([table, scale])

    def step(ids):
        with rx.GradientTape() as tape:
            rows = look_up(table, ids)
            losses = jnp.sum((rows * scale.value) ** 2, (1, 2))
            loss = rx.nn.compute_average_loss(losses)
        optimizer.apply(tape.gradient(loss, [table, scale]), [table, scale])
        return loss

    losses, sizes = [], []
    for ids in batches:
        (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((ids,)).batch(len(ids)))
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=batch), axis=None)))
        sizes.append(largest_collective(strategy, batch))
    return [table, scale, *optimizer.variables], losses, sizes


LOOKUPS = {
    "lookup": rx.experimental.lookup,
    "embedding_lookup": rx.nn.embedding_lookup,
    "index": lambda table, ids: table.value[ids],
    "bfloat16": lambda table, ids: table.value.astype(jnp.bfloat16)[ids].astype(jnp.float32),
    "twice": lambda table, ids: (
        rx.experimental.lookup(table, ids) + 2 * rx.experimental.lookup(table, ids + 1)
    ),
}


def restored(strategy, folder):
    """Trains in one call of ``run_steps``, saves, zeroes the table and restores it."""
    with strategy.scope():
        table = keras.Variable(FIRST)
        optimizer = OPTIMIZERS["adam"]()
        optimizer.build([table])

    def step(batch):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum(rx.experimental.lookup(table, batch[0]) ** 2, (1, 2)))
        optimizer.apply(tape.gradient(loss, [table]), [table])

    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((IDS[:6],)).batch(3))
    strategy.run_steps(step, iter(dataset), 2)
    checkpoint = rx.Checkpoint(table=table, optimizer=optimizer)
    path = checkpoint.save(str(folder / "saved"))
    table.assign(np.zeros_like(FIRST))
    checkpoint.restore(path)
    strategy.run_steps(step, iter(dataset), 2)
    return [np.asarray(v.value) for v in (table, *optimizer.variables)]


def test_several_steps_in_one_call_and_a_checkpoint(tmp_path):
    expected = restored(rx.MirroredStrategy(CPUS[:1]), tmp_path / "one")
    got = restored(rx.MirroredStrategy(CPUS[:2], shard_state="all"), tmp_path / "two")
    assert_close(got, expected, 1e-5, 1e-6)


@functools.cache
def on_one_device(optimizer, batches, look_up):
    with jax.default_device(jax.devices()[0]):
        variables, losses, _ = trained(
            rx.MirroredStrategy(CPUS[:1]), optimizer, BATCHES[batches], LOOKUPS[look_up]
        )
        return losses, [np.asarray(v.value) for v in variables]


@pytest.mark.parametrize(
    ("optimizer", "batches", "look_up", "num_replicas", "size"),
    [
        ("sgd", "even", "lookup", 4, 4),
        pytest.param("adam", "even", "embedding_lookup", 4, 4, marks=pytest.mark.rest),
        ("adagrad", "even", "index", 4, 2),
        ("adam", "uneven", "lookup", 4, 4),
        pytest.param("sgd", "uneven", "embedding_lookup", 4, 2, marks=pytest.mark.rest),
        ("sgd", "even", "bfloat16", 2, 2),
        pytest.param("sgd", "uneven", "twice", 8, 8, marks=pytest.mark.rest),
    ],
)
def test_training_equals_one_device_and_moves_rows(optimizer, batches, look_up, num_replicas, size):
    strategy = rx.MirroredStrategy(CPUS[:num_replicas], shard_state="all", shard_size=size)
    variables, losses, sizes = trained(strategy, optimizer, BATCHES[batches], LOOKUPS[look_up])
    values = [np.asarray(v.value) for v in variables]
    wanted = on_one_device(optimizer, batches, look_up)
    tolerance = 1e-2 if look_up == "bfloat16" else 1e-5
    assert_close([losses, values], list(wanted), tolerance, tolerance)
    for variable in variables:
        if variable.shape == FIRST.shape:
            held = {shard.data.shape for shard in variable.value.addressable_shards}
            assert held == {(ROWS // size, WIDTH)}
    assert max(sizes) < FIRST.nbytes / 64


def largest_collective(strategy, batch):
    """Returns the most bytes that a collective of the last program moves."""
    if strategy.num_replicas_in_sync == 1:
        return 0  # its collectives are of one device
    compiled = strategy.runner.last_launcher.lower(
        [getattr(leaf, "stored", leaf) for leaf in batch]
    ).compile()
    results = COLLECTIVE.findall(compiled.as_text())
    return max(bytes_of(dtype, dims) for result in results for dtype, dims in ARRAY.findall(result))


def bytes_of(dtype, dims):
    """The bytes of an array, as HLO text describes it: ``bf16``, ``4,8``."""
    bits = 8 if dtype == "pred" else int(re.search(r"\d+$", dtype)[0])
    return bits * math.prod(map(int, filter(None, dims.split(",")))) // 8


def looked_up(how, strategy, table, ids):
    """Looks up ids [R, n], a row for each replica. Returns the rows of all replicas."""
    if how == "cross-replica":
        return rx.experimental.lookup(table, ids)
    values = strategy.experimental_distribute_values_from_function(
        lambda context: ids[context.replica_id_in_sync_group]
    )

    def run(values):
        return strategy.run(lambda ids: rx.experimental.lookup(table, ids), args=(values,))

    run = rx.function(run) if how == "function" else run
    return np.stack(strategy.experimental_local_results(run(values)))


@pytest.mark.parametrize("how", ["run", "function", "cross-replica"])
@pytest.mark.parametrize("make", [rx.Variable, keras.Variable])
@pytest.mark.parametrize("shape", [(16, 3), (7, 4)])
def test_ids_mean_the_same_rows_everywhere(how, make, shape):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    strategy = rx.MirroredStrategy(CPUS[:2], shard_state="all")
    with strategy.scope():
        table = make(values)
    last = shape[0] - 1
    ids = np.array([[0, -1, 1, last], [last, -last - 1, 5, 5]], np.int32)
    np.testing.assert_array_equal(looked_up(how, strategy, table, ids), values[ids])
    beyond = np.array([[last + 1, 0], [-last - 2, 1 << 30]], np.int32)
    rows = np.asarray(looked_up(how, strategy, table, beyond))
    np.testing.assert_array_equal(rows[0, 1], values[0])
    assert np.isnan(rows).sum() == 3 * shape[1]


def test_lookup_without_sharded_state():
    values = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert rx.experimental.lookup(values, [2, 0]).tolist() == values[[2, 0]].tolist()
    gradient = jax.grad(lambda table: rx.experimental.lookup(table, jnp.array([1, 1])).sum())(values)
    assert gradient.tolist() == [[0, 0], [2, 2], [0, 0]]
    strategy = rx.MirroredStrategy(CPUS[:2])
    table = strategy.replicate(jnp.asarray(values))
    rows = strategy.run(lambda table: rx.experimental.lookup(table, jnp.array([2])), args=(table,))
    assert [np.asarray(r).tolist() for r in strategy.experimental_local_results(rows)] == [[[4, 5]]] * 2


def test_table_that_does_not_divide_by_rows_is_cut_by_columns():
    first = np.random.default_rng(0).normal(size=(4099, 64)).astype(np.float32)
    results = []
    for num_replicas, size in ((1, None), (4, 4), (4, 2)):
        strategy = rx.MirroredStrategy(
            CPUS[:num_replicas], shard_state="all" if size else None, shard_size=size
        )
        with strategy.scope():
            table = keras.Variable(first)
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build([table])

        def step(ids, table=table, optimizer=optimizer):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(jnp.sum(rx.experimental.lookup(table, ids) ** 2, -1))
            optimizer.apply(tape.gradient(loss, [table]), [table])

        ids = np.array([4098, 0, 3, 3, 0, 17, 3], np.int32)
        (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((ids,)).batch(7))
        strategy.run(step, args=batch)
        assert largest_collective(strategy, batch) < 64 * 64
        held = {shard.data.shape for shard in table.value.addressable_shards}
        assert held == {(4099, 64 // (size or 1))}
        results.append(np.asarray(table.value))
    assert_close(results[1:], [results[0]] * 2, 1e-6)


def test_fit_equals_one_device():
    """Each replica has 4 or 5 rows of the batches of 18, and 1 or 2 of the last one of 7."""
    inputs = np.random.default_rng(0).integers(0, ROWS, (61, 3)).astype(np.int32)
    inputs[:7] = 5
    targets = np.random.default_rng(1).normal(size=(61, 1)).astype(np.float32)
    results = []
    layout_map = rx.experimental.LayoutMap()
    layout_map["embedding.*/embeddings"] = (None, "logical")
    of_logical = {"devices_per_replica": 2, "layout_map": layout_map}
    for num_devices, size, options in ((1, None, {}), (4, 4, {}), (4, 2, {}), (4, 2, of_logical)):
        strategy = rx.MirroredStrategy(
            CPUS[:num_devices], shard_state="all" if size else None, shard_size=size, **options
        )
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [
                    keras.Input((3,), dtype="int32"),
                    keras.layers.Embedding(ROWS, WIDTH),
                    keras.layers.Flatten(),
                    keras.layers.Dense(1),
                ]
            )
            model.compile(keras.optimizers.Adam(0.01, global_clipnorm=0.1), "mse")
        losses = model.fit(inputs, targets, batch_size=18, epochs=2, verbose=0).history["loss"]
        results.append(
            [losses, model.predict(inputs, verbose=0), [np.asarray(v.value) for v in model.weights]]
        )
        if size:
            held = {shard.data.shape for shard in model.layers[0].embeddings.value.addressable_shards}
            assert held == {(ROWS // size, WIDTH // 2 if options else WIDTH)}
    assert_close(results[1:], [results[0]] * 3, 1e-5, 1e-6)


def of_losses(table, ids):
    return (rx.nn.embedding_lookup_sparse(table, ids, mask=ids >= 0, combiner="sqrtn") ** 2).sum(-1)


def tied(table, ids):
    rows = rx.experimental.lookup(table, ids)
    return (rows @ table.value[:4].T).sum((1, 2)) + (rows**2).sum((1, 2))


@pytest.mark.parametrize("losses_of", [of_losses, tied])
def test_functional_gradients_with_optax(losses_of):
    optax = pytest.importorskip("optax")
    results = []
    for num_replicas in (1, 4):
        strategy = rx.MirroredStrategy(CPUS[:num_replicas], shard_state="all")
        with strategy.scope():
            table = rx.Variable(FIRST)
        optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.adam(0.1))
        state = strategy.replicate(optimizer.init(FIRST))

        def step(state, ids, table=table, optimizer=optimizer):
            loss, (gradient,) = rx.value_and_grad(
                lambda: rx.nn.compute_average_loss(losses_of(table, ids)), variables=[table]
            )()
            updates, state = optimizer.update(gradient, state)
            table.assign_add(updates)
            return state, loss

        (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((IDS[:5],)).batch(5))
        for _ in range(2):
            state, loss = strategy.run(step, args=(state, *batch))
            of_first = [strategy.experimental_local_results(leaf)[0] for leaf in jax.tree.leaves(state)]
            state = strategy.replicate(jax.tree.unflatten(jax.tree.structure(state), of_first))
        results.append([strategy.reduce("SUM", loss, axis=None), table.numpy()])
    assert_close(results[1], results[0], 1e-5, 1e-6)

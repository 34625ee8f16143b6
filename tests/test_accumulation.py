"""``rx.experimental.accumulate``: the numbers of one device and one large batch, in less memory, with one exchange."""

import functools

import jax
import jax.numpy as jnp
import keras
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from checks import assert_close, message
from replicax._src.functions.accumulation import micro_batch_sizes
from replicax._src.tracing import gathers

CPUS = [f"cpu:{i}" for i in range(4)]
ROWS = 29
SIZES = (16, 13)  # over 4 replicas: 4 4 4 4, then 4 3 3 3; in 3 micro-batches: 2 1 1, then 1 1 1
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, 6, 5)).astype(np.float32)
Y = RANDOM.normal(size=(ROWS, 6)).astype(np.float32)
MASK = (np.arange(6) < RANDOM.integers(0, 7, size=(ROWS, 1))).astype(np.float32)  # some rows have no token
W = RANDOM.normal(size=(5, 8)).astype(np.float32)
V = RANDOM.normal(size=(8,)).astype(np.float32)


def loss_of(params, x, y, mask):
    w, v = params
    return jnp.sum(mask * (jnp.tanh(x @ w) @ v - y) ** 2)


@functools.cache
def on_one_device():
    """The losses and parameters of training with batches of 16 and 13 rows, on one device without replicax."""
    params, losses, start = (W, V), [], 0
    for size in SIZES:
        x, y, mask = (a[start : start + size] for a in (X, Y, MASK))
        start += size
        loss, gradients = jax.value_and_grad(lambda p: loss_of(p, x, y, mask) / mask.sum())(params)  # noqa: B023
        params = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
        losses.append(float(loss))
    return losses, params


def batches(strategy):
    """The two batches. Each is one step of a dataset."""
    start = 0
    for size in SIZES:
        rows = tuple(a[start : start + size] for a in (X, Y, MASK))
        start += size
        (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(size))
        yield batch


def step_of(strategy, number):
    with strategy.scope():
        params = [rx.Variable(W), rx.Variable(V)]

    @rx.experimental.accumulate(number)
    def gradients_of(batch):
        with rx.GradientTape() as tape:
            loss = loss_of([p.value for p in params], *batch)
        return (loss, tape.gradient(loss, params)), jnp.sum(batch[2])

    def step(batch):
        loss, gradients = gradients_of(batch)
        totals = rx.get_replica_context().all_reduce("SUM", gradients)
        for variable, total in zip(params, totals, strict=True):
            variable.assign_sub(0.1 * total)
        return loss

    return step, params


def check(losses, params):
    expected, expected_params = on_one_device()
    assert_close([float(loss) for loss in losses], expected, 1e-5)
    assert_close([np.asarray(p) for p in params], list(map(np.asarray, expected_params)), 1e-5, 1e-6)


@pytest.mark.parametrize(("rows", "number", "sizes"), [
    (8, 4, [(4, 2)]), (7, 3, [(1, 3), (2, 2)]), (2, 4, [(2, 1)]), (0, 4, []), (5, 1, [(1, 5)]),
])  # fmt: skip
def test_sizes_of_micro_batches_differ_by_at_most_one(rows, number, sizes):
    assert micro_batch_sizes(rows, number) == sizes


@pytest.mark.parametrize(
    ("options", "number", "num_replicas"),
    [
        ({}, 3, 4),
        ({}, 1, 4),
        ({}, 40, 4),  # each row is a micro-batch
        ({"shard_state": "all"}, 3, 4),
        pytest.param({"shard_state": "optimizer"}, 2, 2, marks=pytest.mark.rest),
        ({}, 5, 1),
    ],
)
def test_masked_uneven_batches_equal_one_large_batch(options, number, num_replicas, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)
    strategy = rx.MirroredStrategy(CPUS[:num_replicas], **options)
    step, params = step_of(strategy, number)
    losses = [
        strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None) for batch in batches(strategy)
    ]
    check(losses, [p.numpy() for p in params])


@pytest.mark.parametrize("how", ["function", "eager"])
def test_ways_to_run(how):
    strategy = rx.MirroredStrategy(CPUS)
    step, params = step_of(strategy, 3)
    options = rx.RunOptions(eager=True) if how == "eager" else None

    def total(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,), options=options), axis=None)

    call = rx.function(total) if how == "function" else total
    check([call(batch) for batch in batches(strategy)], [p.numpy() for p in params])


def test_several_steps_in_one_call():
    strategy = rx.MirroredStrategy(CPUS)
    step, params = step_of(strategy, 3)
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays((X, Y, MASK)).batch(16))
    losses = strategy.reduce("SUM", strategy.run_steps(step, iter(dataset), 2), axis=None)
    check(losses, [p.numpy() for p in params])


def test_replicas_without_rows_take_part():
    strategy = rx.MirroredStrategy(CPUS)
    step, params = step_of(strategy, 3)
    rows = tuple(a[:2] for a in (X, Y, np.ones_like(MASK)))  # on replicas 0 and 1
    (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays(rows).batch(2))
    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
    expected, gradients = jax.value_and_grad(lambda p: loss_of(p, *rows) / 12)((W, V))
    assert_close(float(loss), float(expected), 1e-5)
    assert_close([p.numpy() for p in params], [W - 0.1 * gradients[0], V - 0.1 * gradients[1]], 1e-5, 1e-6)


def test_functional_state_and_optax():
    strategy = rx.MirroredStrategy(CPUS)
    optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(0.1))

    @rx.experimental.accumulate(3)
    def gradients_of(batch, params):
        return jax.value_and_grad(loss_of)(params, *batch), jnp.sum(batch[2])

    def step(state, batch):
        params, slots = state
        loss, gradients = gradients_of(batch, params)
        updates, slots = optimizer.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), loss

    state, losses = strategy.replicate(((W, V), optimizer.init((W, V)))), []
    for batch in batches(strategy):
        state, loss = strategy.run(step, args=(state, batch))
        losses.append(strategy.reduce("SUM", loss, axis=None))
    check(losses, [strategy.experimental_local_results(p)[0] for p in state[0]])


def test_state_of_nnx_modules():
    strategy = rx.MirroredStrategy(CPUS)
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)
    optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(0.1))

    def loss(params, x, y):
        return jnp.sum((nnx.merge(graph, params)(x)[:, 0] - y) ** 2)

    @rx.experimental.accumulate(3)
    def gradients_of(batch, params):
        return jax.value_and_grad(loss)(params, *batch), len(batch[0])

    def step(params, batch):
        value, gradients = gradients_of(batch, params)
        updates, _ = optimizer.update(gradients, optimizer.init(params), params)
        return optax.apply_updates(params, updates), value

    rows = rx.data.from_arrays((X[:, 0], Y[:, 0])).batch(ROWS)
    (batch,) = strategy.experimental_distribute_dataset(rows)
    new, value = strategy.run(step, args=(strategy.replicate(params), batch))
    expected, gradients = jax.value_and_grad(lambda p: loss(p, X[:, 0], Y[:, 0]) / ROWS)(params)
    assert_close(float(strategy.reduce("SUM", value, axis=None)), float(expected), 1e-5)
    got = [
        strategy.experimental_local_results(leaf)[0] for leaf in jax.tree.leaves(new, is_leaf=_is_distributed)
    ]
    wanted = [p - 0.1 * g for p, g in zip(jax.tree.leaves(params), jax.tree.leaves(gradients), strict=True)]
    assert_close(list(map(np.asarray, got)), list(map(np.asarray, wanted)), 1e-5, 1e-6)


def _is_distributed(value):
    return isinstance(value, rx.DistributedValues)


def test_value_and_grad_inside():
    strategy = rx.MirroredStrategy(CPUS)
    with strategy.scope():
        params = [rx.Variable(W), rx.Variable(V)]

    @rx.experimental.accumulate(2)
    def gradients_of(batch):
        values = rx.value_and_grad(lambda: loss_of([p.value for p in params], *batch), variables=params)()
        return values, jnp.sum(batch[2])

    def step(batch):
        loss, gradients = gradients_of(batch)
        for p, g in zip(params, rx.get_replica_context().all_reduce("SUM", gradients), strict=True):
            p.assign_sub(0.1 * g)
        return loss

    losses = [strategy.reduce("SUM", strategy.run(step, args=(b,)), axis=None) for b in batches(strategy)]
    check(losses, [p.numpy() for p in params])


def test_outside_of_replica_functions_there_is_one_replica():
    w, v = rx.Variable(W), rx.Variable(V)

    @rx.experimental.accumulate(4)
    def gradients_of(batch):
        with rx.GradientTape() as tape:
            loss = loss_of((w.value, v.value), *batch)
        return (loss, tape.gradient(loss, [w, v])), jnp.sum(batch[2])

    losses, start = [], 0
    for size in SIZES:
        loss, gradients = gradients_of(tuple(a[start : start + size] for a in (X, Y, MASK)))
        start += size
        losses.append(loss)
        w.assign_sub(0.1 * gradients[0])
        v.assign_sub(0.1 * gradients[1])
    check(losses, [w.numpy(), v.numpy()])


def test_rows_that_all_replicas_share_count_once_for_each():
    strategy = rx.MirroredStrategy(CPUS[:2])
    with strategy.scope():
        w = rx.Variable(np.ones(3, np.float32))
        optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.sgd(1.0))

    @rx.experimental.accumulate(2)
    def gradients_of(x):
        return jax.grad(lambda w: jnp.sum(x @ w))(w.value), x.shape[0]

    def step(x):
        updates, _ = optimizer.update(gradients_of(x), optimizer.init(w.value))
        w.assign_add(updates)

    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    strategy.run(step, args=(x,))
    np.testing.assert_allclose(w.numpy(), 1 - x.mean(0), rtol=1e-6)


def trained_in_keras(strategy, number, *, dropout):
    keras.utils.set_random_seed(1)
    with strategy.scope():
        layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(momentum=0.5)]
        layers += [keras.layers.Dropout(0.5, seed=3)] if dropout else []
        model = keras.Sequential([keras.Input((5,)), *layers, keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam(1e-2)
        seen = keras.metrics.Mean()

    @rx.experimental.accumulate(number)
    def gradients_of(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            errors = (model(x, training=True)[:, 0] - y) ** 2
            loss = jnp.sum(errors)
        seen.update_state(errors)
        return (loss, tape.gradient(loss, model.trainable_variables)), x.shape[0]

    def step(batch):
        loss, gradients = gradients_of(batch)
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    losses = []
    rows = rx.data.from_arrays((X[:, 0], Y[:, 0])).batch(16)
    for batch in strategy.experimental_distribute_dataset(rows):
        losses.append(float(strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)))
    return losses, float(seen.result()), model, optimizer


def test_variables_pass_from_one_micro_batch_to_the_next():
    mean = rx.Variable(np.zeros(5, np.float32), trainable=False)
    twice = rx.Variable(np.float32(0), trainable=False)

    @rx.experimental.accumulate(4)
    def averages_of(x):
        mean.assign(0.5 * mean.value + 0.5 * x.mean(0))
        twice.assign(mean.value.sum())
        return twice.value, 1

    rows = X[:13, 0]
    expected, sums = np.zeros(5), []
    for start, stop in (0, 4), (4, 7), (7, 10), (10, 13):
        expected = 0.5 * expected + 0.5 * rows[start:stop].mean(0)
        sums.append(expected.sum())
    assert float(averages_of(rows)) == pytest.approx(np.mean(sums), rel=1e-5)
    np.testing.assert_allclose(mean.numpy(), expected, rtol=1e-5)
    assert float(twice.value) == pytest.approx(sums[-1], rel=1e-5)


@pytest.mark.parametrize(("num_replicas", "number"), [(1, 4), pytest.param(4, 2, marks=pytest.mark.rest)])
def test_statistics_seeds_and_metrics_of_keras(num_replicas, number):
    losses, mean, model, optimizer = trained_in_keras(
        rx.MirroredStrategy(CPUS[:num_replicas]), number, dropout=True
    )
    assert mean == pytest.approx(np.average(losses, weights=SIZES), rel=1e-5)
    assert np.abs(np.asarray(model.layers[1].moving_mean.value)).max() > 0
    assert (
        int(model.layers[2].seed_generator.state.value[1]) == 2 * number
    )  # each micro-batch drops other units
    assert int(optimizer.iterations.value) == 2


def sums_of_dtypes(batch):
    return {"half": batch.astype(jnp.bfloat16).sum(), "int": (batch > 0).sum(), "none": None}, batch.shape[0]


def test_dtypes_of_shares():
    rows = np.ones(600, np.float32)
    shares = rx.experimental.accumulate(600)(sums_of_dtypes)(rows)
    assert (shares["half"].dtype, float(shares["half"])) == (
        jnp.bfloat16,
        1.0,
    )  # in bfloat16 the sum would be 256
    assert (shares["int"].dtype, float(shares["int"])) == (jnp.float32, 1.0)
    assert shares["none"] is None


def test_a_count_of_zero_gives_zero():
    share = rx.experimental.accumulate(2)(lambda b: (jnp.sum(b), jnp.float32(0)))(np.ones(4, np.float32))
    assert float(share) == 0


@pytest.mark.parametrize("number", [0, -1, 2.0, "4", True])
def test_the_number_is_a_positive_int(number):
    message(rx.errors.InvalidArgumentError, lambda: rx.experimental.accumulate(number), repr(number))


@pytest.mark.parametrize("result", [
    lambda x: jnp.sum(x),
    lambda x: (jnp.sum(x), 1, 2),
    lambda x: (jnp.sum(x), x),
    lambda x: (jnp.sum(x), x, 1),
    lambda x: (jnp.sum(x), "1"),
    lambda x: (jnp.sum(x), None),
    lambda x: ("text", 1),
    lambda x: (rx.IndexedSlices(x, jnp.arange(len(x))), 1),
    lambda x: (x, len(x)),  # the losses of rows, not their sum
])  # fmt: skip
@pytest.mark.parametrize("rows", [4, 5])
def test_a_function_returns_sums_and_a_count(result, rows):
    accumulated = rx.experimental.accumulate(2)(result)
    message(rx.errors.StructureError, lambda: accumulated(np.ones(rows, np.float32)), "lambda")
    strategy = rx.MirroredStrategy(CPUS[:1])
    eagerly = rx.RunOptions(eager=True)
    if rows == 5:
        with pytest.raises(rx.errors.StructureError):
            strategy.run(accumulated, args=(np.ones(rows, np.float32),), options=eagerly)


def test_a_function_for_one_size_may_have_sums_of_that_size():
    def rows_of(x):
        return jnp.ones(2) * jnp.sum(x.reshape(2, 3)), 1

    assert rx.experimental.accumulate(2)(rows_of)(np.ones((4, 3), np.float32)).tolist() == [6.0, 6.0]


@pytest.mark.parametrize("batch", [
    (np.ones((4, 2)), np.ones((3, 2))), (np.ones((4, 2)), np.float32(1)), (), {"x": np.ones(2), "name": "text"},
])  # fmt: skip
def test_leaves_have_the_same_rows(batch):
    accumulated = rx.experimental.accumulate(2)(lambda batch: (jnp.float32(0), 1))
    message(rx.errors.InvalidArgumentError, lambda: accumulated(batch), "rows")


def test_rows_of_replicas_outside_of_run():
    strategy = rx.MirroredStrategy(CPUS[:2])
    (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays(X).batch(ROWS))
    accumulated = rx.experimental.accumulate(2)(lambda x: (jnp.sum(x), 1))
    message(rx.errors.PerReplicaUseError, lambda: accumulated(batch), "strategy.run")


def test_tape_around_it_where_a_replica_has_no_rows():
    strategy = rx.MirroredStrategy(CPUS)
    with strategy.scope():
        weight = rx.Variable(np.ones(8, np.float32))

    @rx.experimental.accumulate(2)
    def mean_of(rows):
        return jnp.sum(rows * weight.value), rows.shape[0]

    def step(rows):
        with rx.GradientTape() as tape:
            mean = mean_of(rows)
        return rx.get_replica_context().all_reduce("SUM", tape.gradient(mean, weight))

    rows = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones((0 if context.replica_id_in_sync_group == 3 else 4, 8), np.float32)
    )
    assert_close(strategy.experimental_local_results(strategy.run(step, args=(rows,)))[0], np.ones(8), 1e-6)

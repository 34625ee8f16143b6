"""Uneven batches: replicas with different (or no) rows give the numbers of one device with the global batch."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import replicax as rx
from checks import examples
from replicax._src.vocabulary.errors import DivergenceError, StructureError

SIZES = [(3, 2), (2, 1), (1, 0), (3, 2, 2, 2), (2, 2, 2, 1), (1, 0, 0, 0)]


@functools.cache
def mirrored(num_replicas):
    return rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])


@functools.cache
def one_device():
    return rx.OneDeviceStrategy("cpu:0")


def by_replica(strategy, sizes, make):
    """Per-replica values; ``make`` returns one for the number of rows and the first row's number."""
    starts = np.cumsum((0, *sizes))
    return strategy.experimental_distribute_values_from_function(
        lambda context: make(
            sizes[context.replica_id_in_sync_group], starts[context.replica_id_in_sync_group]
        )
    )


def rows(sizes):
    """Per-replica values of the row numbers 0, 1, ... as floats."""
    return by_replica(
        mirrored(len(sizes)), sizes, lambda n, start: np.arange(start, start + n, dtype="float32")
    )


def features(*shape, num_rows):
    return np.random.default_rng(1).normal(size=(num_rows, *shape)).astype("float32")


def labels(num_rows):
    return np.random.default_rng(2).integers(0, 3, size=num_rows).astype("int32")


def token_ids(num_rows):
    return np.random.default_rng(3).integers(0, 12, size=(num_rows, 4)).astype("int32")


# --- models -------------------------------------------------------------------------------------------


def mlp():
    return keras.Sequential([keras.Input((4,)), layers.Dense(5, activation="relu"), layers.Dense(3)])


def cnn():
    return keras.Sequential(
        [
            keras.Input((4, 4, 1)),
            layers.Conv2D(2, 3),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(3),
        ]
    )


def bidirectional():
    return keras.Sequential([keras.Input((3, 2)), layers.Bidirectional(layers.LSTM(2)), layers.Dense(3)])


def attention():
    x = keras.Input((3, 4))
    return keras.Model(x, layers.Dense(3)(layers.Flatten()(layers.MultiHeadAttention(2, 2)(x, x))))


def embedding():
    return keras.Sequential(
        [keras.Input((4,), dtype="int32"), layers.Embedding(12, 3), layers.Flatten(), layers.Dense(3)]
    )


MODELS = {
    "mlp": (mlp, lambda n: features(4, num_rows=n)),
    "cnn": (cnn, lambda n: features(4, 4, 1, num_rows=n)),
    "bidirectional": (bidirectional, lambda n: features(3, 2, num_rows=n)),
    "attention": (attention, lambda n: features(3, 4, num_rows=n)),
    "embedding": (embedding, token_ids),
}


def clipped_sgd():
    """Momentum and a clipped global norm, which couples all gradients."""
    return keras.optimizers.SGD(0.5, momentum=0.9, global_clipnorm=0.7)


def train_two_steps(strategy, name, num_rows, make_optimizer=clipped_sgd):
    """The loss of each step, the logits, and the trained weights."""
    build, make_features = MODELS[name]
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model, optimizer = build(), make_optimizer()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

    def step(x, y):
        with rx.GradientTape() as tape:
            logits = model(x, training=True)
            loss = optimizer.scale_loss(rx.nn.compute_average_loss(loss_object(y, logits)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))
        return loss, logits

    batch = make_features(num_rows), labels(num_rows)
    losses = []
    for x, y in strategy.experimental_distribute_dataset([batch, batch]):
        loss, logits = strategy.run(step, args=(x, y))
        losses.append(float(strategy.reduce("SUM", loss, axis=None)))
    logits = np.concatenate([np.asarray(part) for part in strategy.experimental_local_results(logits)])
    return losses, logits, [np.asarray(v.value) for v in model.trainable_variables]


@functools.cache
def reference(name, num_rows):
    return train_two_steps(one_device(), name, num_rows)


# Each model has rows for some replicas only, or another number for each; "mlp" has all sizes.
LONG = {("cnn", 2), ("bidirectional", 4), ("attention", 2), ("attention", 4), ("embedding", 4)}
REST = {("bidirectional", 2), ("cnn", 4)}
REST_SIZES = {(1, 0), (3, 2, 2, 2), (1, 0, 0, 0)}  # as others of "mlp" are


def marks_of(name, sizes):
    case = name, len(sizes)
    return [pytest.mark.long] * (case in LONG) + [pytest.mark.rest] * (case in REST)


@pytest.mark.parametrize(
    ("name", "sizes"),
    [pytest.param("mlp", sizes, marks=[pytest.mark.rest] * (sizes in REST_SIZES)) for sizes in SIZES]
    + [
        pytest.param(name, sizes, marks=marks_of(name, sizes))
        for name in MODELS
        if name != "mlp"
        for sizes in ((2, 1), (1, 0, 0, 0))
    ],
)
def test_training_equals_one_device(name, sizes):
    """1e-5: float32 sums in another order."""
    losses, logits, weights = train_two_steps(mirrored(len(sizes)), name, sum(sizes))
    expected_losses, expected_logits, expected_weights = reference(name, sum(sizes))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    np.testing.assert_allclose(logits, expected_logits, rtol=1e-5, atol=1e-5)
    for value, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


def scaled_adam():
    inner = keras.optimizers.Adam(0.01, gradient_accumulation_steps=2, clipnorm=0.1)
    return keras.optimizers.LossScaleOptimizer(inner, initial_scale=64.0)


@pytest.mark.parametrize("sizes", [(2, 1), pytest.param((1, 0), marks=pytest.mark.long)], ids=str)
def test_a_scaled_loss_accumulated_gradients_and_adam_equal_one_device(sizes):
    losses, _, weights = train_two_steps(mirrored(len(sizes)), "mlp", sum(sizes), scaled_adam)
    expected_losses, _, expected_weights = train_two_steps(one_device(), "mlp", sum(sizes), scaled_adam)
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for value, expected in zip(weights, expected_weights, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)  # Adam magnifies rounding


def test_a_replica_without_rows_gives_no_nan_through_batch_normalisation():
    """One replica has both rows, so that its statistics are those of the global batch, as on one device."""

    def train(strategy, x, y):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            model = keras.Sequential(
                [keras.Input((4,)), layers.Dense(3), layers.BatchNormalization(momentum=0.5), layers.Dense(3)]
            )
            optimizer = keras.optimizers.SGD(0.5, global_clipnorm=0.7)
        loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)

        def step(x, y):
            with rx.GradientTape() as tape:
                loss = rx.nn.compute_average_loss(loss_object(y, model(x, training=True)))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))

        for _ in range(2):
            strategy.run(step, args=(x, y))
        return [np.asarray(v.value) for v in model.variables]

    x, y = features(4, num_rows=3), labels(3)
    expected = train(one_device(), x, y)
    empty_last = [
        mirrored(2).experimental_distribute_values_from_function(
            lambda context, whole=whole: whole if context.replica_id_in_sync_group == 0 else whole[:0]
        )
        for whole in (x, y)
    ]
    for value, wanted in zip(train(mirrored(2), *empty_last), expected, strict=True):
        np.testing.assert_allclose(value, wanted, rtol=1e-4, atol=1e-6)


# --- any number of rows, any number of replicas -------------------------------------------------------


@functools.cache
def variable_of(num_replicas):
    with mirrored(num_replicas).scope():
        return rx.Variable(2.0, name="w")


@functools.cache
def step_of(num_replicas):
    w = variable_of(num_replicas)

    def step(x):
        replica = rx.get_replica_context()
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(jnp.sum((w * x) ** 2, axis=1))
        gradient = replica.all_reduce("SUM", tape.gradient(loss, w))
        total = replica.all_reduce("SUM", jnp.sum(x, axis=0))
        return {"loss": loss, "gradient": gradient, "total": total, "rows": x * 2}

    return step


@examples(12, short=6)
@hypothesis.given(num_rows=st.integers(0, 12), num_replicas=st.integers(1, 4))
def test_sums_means_and_gradients_for_any_sizes(num_rows, num_replicas):
    """Sums over rows, the mean loss and its gradient, and the mean over rows, for N rows over R replicas."""
    strategy = mirrored(num_replicas)
    data = features(2, num_rows=num_rows)
    (x,) = strategy.experimental_distribute_dataset([data])
    result = strategy.run(step_of(num_replicas), args=(x,))
    squares = np.sum(data**2, axis=1)
    mean = np.mean(squares) if num_rows else 0.0
    reduce = strategy.reduce
    np.testing.assert_allclose(reduce("SUM", result["loss"], axis=None), 4 * mean, rtol=1e-5)
    np.testing.assert_allclose(reduce("MEAN", result["gradient"], axis=None), 4 * mean, rtol=1e-5)
    np.testing.assert_allclose(
        reduce("MEAN", result["total"], axis=None), data.sum(axis=0), rtol=1e-5, atol=1e-6
    )
    gathered = strategy.gather(result["rows"], axis=0)
    np.testing.assert_array_equal(gathered, data * 2)
    if num_rows:
        by_rows = data.mean(axis=0) * 2
        np.testing.assert_allclose(reduce("MEAN", result["rows"], axis=0), by_rows, rtol=1e-5, atol=1e-6)


# --- collectives --------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(2, 1), (1, 0, 0, 0)], ids=str)
def test_a_psum_inside_the_loss_is_differentiated(sizes):
    strategy = mirrored(len(sizes))
    with strategy.scope():
        w = rx.Variable(np.ones(2, "float32"))
    data = features(2, num_rows=sum(sizes))

    def loss_of(weights, x, total):
        return total(jnp.sum(jnp.tanh(x @ weights))) ** 2

    def step(x):
        total = lambda value: rx.get_replica_context().all_reduce("SUM", value)  # noqa: E731
        with rx.GradientTape() as tape:
            loss = loss_of(w, x, total) / len(sizes)
        return loss, total(tape.gradient(loss, w))

    (x,) = strategy.experimental_distribute_dataset([data])
    loss, gradient = strategy.run(step, args=(x,))
    expected = jax.value_and_grad(lambda weights: loss_of(weights, data, lambda value: value))(jnp.ones(2))
    np.testing.assert_allclose(strategy.reduce("SUM", loss, axis=None), expected[0], rtol=1e-5)
    for component in gradient.values:
        np.testing.assert_allclose(component, expected[1], rtol=1e-5)


@pytest.mark.parametrize("sizes", [(3, 2), (1, 0), (2, 2, 2, 1), (1, 3, 0, 2)], ids=str)
def test_all_gather_of_the_ragged_dim(sizes):
    strategy = mirrored(len(sizes))

    def gather(x):
        gathered = rx.get_replica_context().all_gather(2 * x, axis=0)
        return gathered, jnp.sum(gathered) + jnp.sum(x)

    gathered, total = strategy.run(gather, args=(rows(sizes),))
    numbers = np.arange(sum(sizes), dtype="float32")
    assert gathered.is_equal
    for component in gathered.values:
        np.testing.assert_array_equal(component, 2 * numbers)
    own = [part.sum() for part in np.split(numbers, np.cumsum(sizes)[:-1])]
    np.testing.assert_allclose([float(t) for t in total.values], [2 * numbers.sum() + s for s in own])


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint], ids=["jit", "checkpoint"])
def test_collectives_inside_a_called_function_of_the_ragged_batch(wrap):
    """The function's arguments differ in shape; the exchanged values do not."""

    @wrap
    def squared_total(x):
        return rx.get_replica_context().all_reduce("SUM", jnp.sum(x)) ** 2

    def step(x):
        return squared_total(x), jax.grad(squared_total)(x)

    total, gradient = mirrored(2).run(step, args=(rows((2, 1)),))
    assert total.is_equal
    assert [float(v) for v in total.values] == [9.0, 9.0]
    # Each replica's share (2 x 3) is summed over both, as all_reduce differentiates.
    np.testing.assert_allclose(gradient.values[0], [12.0, 12.0])
    np.testing.assert_allclose(gradient.values[1], [12.0])


def test_gathers_of_gathers_learn_their_shapes_one_after_the_other():
    """Each shape is known only after the earlier ones: the function is traced until no shape is guessed."""
    strategy = mirrored(2)
    seen = []

    def step(x):
        for _ in range(5):
            x = rx.get_replica_context().all_gather(x, axis=0)
        seen.append(x.shape)
        return x @ jnp.ones(3 * 2**4)

    result = strategy.run(step, args=(rows((2, 1)),))
    assert seen[-1] == (48,)
    np.testing.assert_allclose([float(v) for v in result.values], [48.0, 48.0])


def test_a_users_error_is_raised_as_it_is():
    def step(x):
        rx.get_replica_context().all_gather(x, axis=0)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        mirrored(2).run(step, args=(rows((2, 1)),))


def test_the_gradient_of_all_gather_is_the_own_slice_of_the_summed_gradients():
    strategy = mirrored(2)

    def step(x):
        with rx.GradientTape() as tape:
            tape.watch(x)
            gathered = rx.get_replica_context().all_gather(x, axis=0)
            loss = jnp.sum(gathered**2 * jnp.arange(1.0, 4.0))
        return tape.gradient(loss, x)

    gradient = strategy.run(step, args=(rows((2, 1)),))
    # Both replicas' losses depend on every row: 2 * (2 x w).
    np.testing.assert_allclose(gradient.values[0], [0.0, 8.0])
    np.testing.assert_allclose(gradient.values[1], [24.0])


def test_collectives_inside_a_scan_whose_shapes_do_not_depend_on_the_batch():
    strategy = mirrored(2)

    def step(x):
        def body(carry, _):
            return carry + rx.get_replica_context().all_reduce("SUM", carry), None

        return jax.lax.scan(body, jnp.sum(x), length=3)[0]

    result = strategy.run(step, args=(rows((3, 2)),))
    # From 3 and 7, each step adds the sum of both: 10, 30, 90.
    np.testing.assert_allclose([float(v) for v in result.values], [133.0, 137.0])


def test_all_reduce_of_the_ragged_dim_raises_and_says_what_to_do():
    strategy = mirrored(2)
    with pytest.raises(StructureError, match="reduce over the batch first") as caught:
        strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", x), args=(rows((2, 1)),))
    assert "(2,)" in str(caught.value)
    assert "(1,)" in str(caught.value)


def test_a_gradient_that_is_summed_for_one_size_is_summed_for_all():
    """Otherwise the replicas would not meet in the same collectives."""
    strategy = mirrored(2)
    optimizer = keras.optimizers.SGD(1.0)
    with strategy.scope():
        weight = keras.Variable(10.0, dtype="float32")
        optimizer.build([weight])

    def step(x):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        optimizer.apply([total if x.shape[0] > 1 else jnp.zeros(())], [weight])

    strategy.run(step, args=(rows((2, 1)),))
    assert float(weight.value) == 10.0 - (0 + 1 + 2)


def test_python_branch_on_the_batch_around_a_collective_raises():
    strategy = mirrored(2)

    def step(x):
        if x.shape[0] > 1:
            return rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        return jnp.sum(x)

    with pytest.raises(StructureError, match=r"x\.shape\[0\]"):
        strategy.run(step, args=(rows((2, 1)),))


def test_other_structures_for_other_sizes_raise():
    strategy = mirrored(2)
    with pytest.raises(StructureError, match="different structures"):
        strategy.run(lambda x: (x, x) if x.shape[0] > 1 else x, args=(rows((2, 1)),))


def test_other_variables_for_other_sizes_raise():
    strategy = mirrored(2)
    with strategy.scope():
        first, second = rx.Variable(0.0, name="first"), rx.Variable(0.0, name="second")

    def step(x):
        (first if x.shape[0] > 1 else second).assign(1.0)

    with pytest.raises(StructureError, match="assigns different variables"):
        strategy.run(step, args=(rows((2, 1)),))
    assert float(first) == float(second) == 0.0


# --- Python numbers that differ -----------------------------------------------------------------------


def test_a_batch_size_as_a_python_number_is_found_to_differ():
    strategy = mirrored(2)
    with strategy.scope():
        count = rx.Variable(0, name="num_rows_seen")

    def step(x):
        count.assign_add(x.shape[0])

    strategy.run(step, args=(rows((2, 2)),))
    assert int(count) == 2
    with pytest.raises(DivergenceError, match="num_rows_seen"):
        strategy.run(step, args=(rows((2, 1)),))
    assert int(count) == 2


@pytest.mark.parametrize("sizes", [(2, 1), (1, 0, 0, 0), (3, 3)], ids=str)
def test_a_batch_size_as_a_python_number_can_be_summed(sizes):
    strategy = mirrored(len(sizes))
    with strategy.scope():
        count = rx.Variable(0, aggregation=rx.VariableAggregation.SUM)
    for _ in range(2):
        strategy.run(lambda x: count.assign_add(x.shape[0]), args=(rows(sizes),))
    assert int(count) == 2 * sum(sizes)


def test_a_variable_that_does_not_depend_on_the_size_may_be_written():
    strategy = mirrored(2)
    with strategy.scope():
        steps, scale = rx.Variable(0, name="steps"), rx.Variable(1.0, name="scale")

    def step(x):
        steps.assign_add(1)
        scale.assign(jnp.exp(scale) * jnp.float32(steps) / 2)
        return jnp.sum(x)

    strategy.run(step, args=(rows((2, 1)),))
    assert int(steps) == 1
    np.testing.assert_allclose(float(scale), np.e / 2, rtol=1e-6)


@jax.custom_vjp
def halved(x):
    return x / 2


halved.defvjp(lambda x: (halved(x), None), lambda _, cotangent: (cotangent,))

# Computations of a variable without any row.
OF_A_VARIABLE = {
    "custom_vjp": halved,
    "custom_jvp": jax.nn.softplus,
    "jit": jax.jit(lambda v: v / 2),
    "checkpoint": jax.checkpoint(lambda v: v / 2),
    "scan": lambda v: jax.lax.scan(lambda c, row: (c, row / 2 + c), 1.0, v)[1],
    "while": lambda v: jax.lax.while_loop(lambda v: v[0] > 0.1, lambda v: v / 2, v),
    "cond": lambda v: jax.lax.cond(v[0] > 0, lambda v: v / 2, lambda v: -v, v),
    "random": lambda v: v * jax.random.uniform(jax.random.key(0), (2,)),
    "solve": lambda v: jnp.linalg.solve(2 * jnp.eye(2), v),
    "grad": jax.grad(lambda v: jnp.sum(jax.nn.softplus(v) ** 2)),
}


@pytest.mark.parametrize("name", OF_A_VARIABLE)
def test_values_without_rows_are_the_same_in_all_variants(name):
    """No false alarm: the traces for different sizes are recognised as the same computation."""
    strategy = mirrored(2)
    with strategy.scope():
        variable = rx.Variable([1.0, 2.0])
    expected = OF_A_VARIABLE[name](jnp.asarray([1.0, 2.0]))

    def step(x):
        variable.assign(OF_A_VARIABLE[name](variable.value))
        return jnp.sum(x)

    strategy.run(step, args=(rows((2, 1)),))
    np.testing.assert_allclose(variable.value, expected, rtol=1e-6)


def test_python_numbers_that_differ_come_back_per_replica():
    sizes = mirrored(2).run(lambda x: x.shape[0], args=(rows((3, 2)),))
    assert [int(n) for n in sizes.values] == [3, 2]


# --- outputs, statistics, programs --------------------------------------------------------------------


def test_outputs_are_ragged_and_can_be_passed_on():
    strategy = mirrored(4)
    doubled = strategy.run(lambda x: 2 * x, args=(rows((2, 2, 1, 0)),))
    assert [v.shape for v in doubled.values] == [(2,), (2,), (1,), (0,)]
    again = strategy.run(lambda x: (jnp.sum(x + 1), x), args=(doubled,))
    assert [float(v) for v in again[0].values] == [4.0, 12.0, 9.0, 0.0]
    np.testing.assert_array_equal(strategy.gather(again[1], axis=0), 2.0 * np.arange(5))


def test_two_ragged_arguments_with_different_dims():
    """Sequences padded to a different length on each replica, beside an even argument."""
    strategy = mirrored(2)
    x = by_replica(strategy, (3, 2), lambda n, start: np.full((n, n + 1), start, "float32"))
    y = by_replica(strategy, (1, 1), lambda n, start: np.full((n, 1), start + 1, "float32"))
    result = strategy.run(lambda x, y: (x.T * y, jnp.sum(x)), args=(x, y))
    assert [v.shape for v in result[0].values] == [(4, 3), (3, 2)]
    np.testing.assert_array_equal(result[0].values[1], np.full((3, 2), 6.0))
    assert [float(v) for v in result[1].values] == [0.0, 18.0]


def test_booleans_integers_and_random_keys_cross_the_cuts():
    strategy = mirrored(2)

    def step(x):
        key = jax.random.key(7)
        positive, whole = x > 1, x.astype("int32")
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(x))
        noise = jax.random.uniform(key, (2,))
        return jnp.sum(jnp.where(positive, whole, -1)) + total, noise

    value, noise = strategy.run(step, args=(rows((2, 1)),))
    assert [float(v) for v in value.values] == [1.0, 5.0]
    np.testing.assert_array_equal(noise.values[0], jax.random.uniform(jax.random.key(7), (2,)))


@pytest.mark.parametrize("sizes", [(3, 1), (2, 0), (1, 0, 0, 0)], ids=str)
def test_batch_normalisation_statistics_are_weighted_by_rows_and_never_nan(sizes):
    strategy = mirrored(len(sizes))
    with strategy.scope():
        layer = layers.BatchNormalization(momentum=0.5)
        layer.build((None, 1))
    x = by_replica(
        strategy, sizes, lambda n, start: np.arange(start, start + n, dtype="float32")[:, None] + 1
    )
    strategy.run(lambda x: layer(x, training=True), args=(x,))
    parts = np.split(np.arange(sum(sizes), dtype="float32") + 1, np.cumsum(sizes)[:-1])
    means = sum(len(p) * p.mean() for p in parts if len(p)) / sum(sizes)
    variances = sum(len(p) * p.var() for p in parts if len(p)) / sum(sizes)
    np.testing.assert_allclose(layer.moving_mean.value, [0.5 * means], rtol=1e-5)
    np.testing.assert_allclose(layer.moving_variance.value, [0.5 + 0.5 * variances], rtol=1e-5)


def test_metrics_count_each_row_once():
    strategy = mirrored(4)
    with strategy.scope():
        mean = keras.metrics.Mean()
        accuracy = keras.metrics.SparseCategoricalAccuracy()

    def step(x, logits):
        mean.update_state(x)
        accuracy.update_state(jnp.zeros(x.shape[0], "int32"), logits)

    logits = np.eye(2, dtype="float32")[[0, 1, 0, 1, 0, 0, 0]]
    data = [(np.arange(7, dtype="float32"), logits), (np.full(1, 9.0, "float32"), logits[1:2])]
    for x, y in strategy.experimental_distribute_dataset(data):
        strategy.run(step, args=(x, y))
    np.testing.assert_allclose(float(mean.result()), (21 + 9) / 8, rtol=1e-6)
    np.testing.assert_allclose(float(accuracy.result()), 5 / 8, rtol=1e-6)


def test_the_number_of_programs_is_bounded_by_the_sizes_met():
    """One program for the full batches and one for the last, for any number of epochs."""
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    traces = []

    def step(x):
        traces.append(x.shape)
        return jnp.sum(x)

    data = [np.ones((4, 2), "float32"), np.ones((4, 2), "float32"), np.ones((3, 2), "float32")]
    totals = []
    for _ in range(3):
        for x in strategy.experimental_distribute_dataset(data):
            totals.append(float(strategy.reduce("SUM", strategy.run(step, args=(x,)), axis=None)))
    assert totals == [8.0, 8.0, 6.0] * 3
    assert strategy.runner.num_programs == 2
    assert set(traces) == {(2, 2), (1, 2)}
    assert len(traces) <= 5  # once for the even program, at most two rounds of two variants

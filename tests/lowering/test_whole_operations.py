"""Operations that XLA's partitioner computes wrongly are replicated at any depth, and steps give the numbers of one
device."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from checks import assert_close, tpu_strategy
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering import whole_operations

pytestmark = pytest.mark.rest

ROWS = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
IDS = np.array([0, 2, 2, 1, 0])


def direct(table, rows, ids):
    return table.at[ids].add(rows)


def in_a_loop(table, rows, ids):
    return jax.lax.scan(lambda t, _: (jax.jit(direct)(t, rows, ids) * 2, None), table, None, length=2)[0]


def in_branches(table, rows, ids):
    return jax.lax.cond(ids[0] > 0, lambda t: t, lambda t: jax.checkpoint(direct)(t, rows, ids), table)


def in_a_gradient(table, rows, ids):
    def loss(table):
        return jnp.sum(jnp.sin(jax.checkpoint(lambda t: t[ids])(table)) * rows)

    return jax.grad(loss)(table)


def until(table, rows, ids):
    constant = jnp.asarray(np.ones(3, np.float32))

    def body(state):
        step, table = state
        return step + 1, table.at[ids].add(rows).at[0].add(constant)

    return jax.lax.while_loop(lambda state: state[0] < 3, body, (0, table))[1]


@pytest.mark.parametrize("fn", [direct, in_a_loop, in_branches, in_a_gradient, until])
@pytest.mark.quick
def test_operations_are_replicated_at_any_depth(fn):
    args = (jnp.ones((4, 3)), ROWS, IDS)
    topology = rx.MirroredStrategy(["cpu:0", "cpu:1"]).topology
    rule = whole_operations.rule_of_batches(4, topology, is_padded=True)
    jaxpr, consts = jax_compat.trace(lambda *args: [fn(*args)], args)
    assert whole_operations.has_wrong(jaxpr, rule)

    def whole(value):
        return jax.lax.with_sharding_constraint(value, topology.replicated)

    def changed(*args):
        return whole_operations.evaluate(jaxpr, [*consts, *args], rule, whole)

    found = str(jax.make_jaxpr(changed)(*args))
    assert found.count("sharding_constraint") == 4 * found.count("= scatter-add") > 0
    np.testing.assert_allclose(jax.jit(changed)(*args)[0], fn(*args), rtol=1e-6)


def conv(x, kernel, **options):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers, **options)


def sliding(x, kernel):
    return jnp.stack([jnp.convolve(column, kernel[0]) for column in x.T])


def pooled_rows(x, kernel):
    return jax.lax.reduce_window(x @ kernel, -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME")


def by_token(x, kernel):
    """Rows are reshaped in between."""
    return jnp.sort((x @ kernel).reshape(-1, 2), 0)


def largest(x, kernel):
    """Segments, of which the first and the last have no rows."""
    of_segments = jax.ops.segment_max(x @ kernel - 9, 1 + jnp.arange(len(x)) % 3, 5)
    return jnp.maximum(of_segments, -20)


def sorted_with_more(x, kernel):
    """More rows than the batch has, and their number does not divide."""
    y = x @ kernel
    return jnp.sort(jnp.concatenate([y, y[:1] * 2, y[-1:] + 1]), 0)


def every_second(x, kernel):
    return jnp.sort((x @ kernel)[::2], 0)


def exclusive_or(x, kernel):
    bits = jnp.bitwise_xor.reduce(jnp.round(x * 8).astype(int), axis=0)
    return x @ kernel * jnp.sin(bits)


# Each gives wrong numbers without this, or ends the process.
OF_ROWS = {
    "sorted": (lambda x, kernel: jnp.sort(x @ kernel, 0), (4,), (4, 4)),
    "sorted_by_token": (by_token, (4,), (4, 4)),
    "largest": (largest, (4,), (4, 4)),
    "sliding": (sliding, (4,), (4, 4)),
    "pooled_rows": (pooled_rows, (4,), (4, 4)),
    "sorted_with_more": (sorted_with_more, (4,), (4, 4)),
    "every_second": (every_second, (4,), (4, 4)),
    "exclusive_or": (exclusive_or, (4,), (4, 4)),
    "depthwise": (lambda x, kernel: conv(x, kernel, feature_group_count=2), (6, 6, 2), (3, 3, 1, 2)),
}
STRATEGIES = {
    "mirrored_3": lambda: rx.MirroredStrategy([f"cpu:{i}" for i in range(3)]),
    "tpu_3x2": lambda: tpu_strategy(3, 2),
}


class Penalty(keras.Model):
    """The loss is a function of all rows and of a kernel."""

    def __init__(self, fn, shape):
        super().__init__()
        self.fn = fn
        self.kernel = self.add_weight(shape=shape, initializer=keras.initializers.RandomNormal(seed=1))

    def call(self, x):
        self.add_loss(jnp.mean(jnp.sin(self.fn(x, jnp.asarray(self.kernel.value)))))
        return x


@pytest.mark.parametrize(
    ("name", "strategy", "num_rows"),
    [
        ("sorted", "mirrored_3", 7),
        ("pooled_rows", "mirrored_3", 6),
        ("largest", "tpu_3x2", 7),
        ("depthwise", "tpu_3x2", 6),
        ("sorted_with_more", "mirrored_3", 6),
        ("exclusive_or", "tpu_3x2", 7),
        *(
            pytest.param(name, strategy, num_rows, marks=pytest.mark.long)
            for name in OF_ROWS
            for strategy in STRATEGIES
            for num_rows in (6, 7)
        ),
    ],
)
def test_steps_equal_one_device(name, strategy, num_rows):
    fn, row, kernel = OF_ROWS[name]
    rows = np.random.default_rng(0).normal(size=(num_rows, *row)).astype(np.float32)

    def trained(strategy):
        with strategy.scope():
            model = Penalty(fn, kernel)
            model.compile(keras.optimizers.SGD(0.5))
        losses = model.fit(rows, batch_size=num_rows, epochs=2, shuffle=False, verbose=0).history["loss"]
        return losses, np.asarray(model.trainable_variables[0].value)

    expected = trained(rx.MirroredStrategy(["cpu:0"]))
    assert np.ptp(expected[0]) > 1e-4
    assert_close(trained(STRATEGIES[strategy]()), expected, 1e-4, 1e-5)


# --- in replicas, over whose logical devices images are split -----------------------------------------------


def pooled(x, kernel):
    return jax.lax.reduce_window(conv(x, kernel), -jnp.inf, jax.lax.max, (1, 2, 2, 1), (1, 1, 1, 1), "SAME")


def assigned(x, kernel):
    return conv(x.at[:, 1].set(0.0).at[:, ::2].add(1.0), kernel)


@pytest.mark.parametrize(
    ("fn", "shards", "sizes"),
    [
        (pooled, (1, 2, 1, 1), (2, 2)),
        (assigned, (1, 2, 1, 1), (2, 1)),
        pytest.param(pooled, (1, 2, 1, 1), (2, 1), marks=pytest.mark.long),
        pytest.param(pooled, (1, 2, 2, 1), (2, 2), marks=pytest.mark.long),
        pytest.param(assigned, (1, 2, 2, 1), (2, 2), marks=pytest.mark.long),
    ],
)
def test_split_images_equal_one_device(fn, shards, sizes):
    random = np.random.default_rng(0)
    kernel = random.normal(size=(3, 3, 2, 2)).astype(np.float32)
    images = [random.normal(size=(size, 8, 8, 2)).astype(np.float32) for size in sizes]
    strategy = tpu_strategy(2, int(np.prod(shards)))

    def gradients(x):
        total, of_inputs = jax.value_and_grad(lambda x, k: jnp.sum(jnp.sin(fn(x, k))), (0, 1))(
            x, jnp.asarray(kernel)
        )
        return [total, *of_inputs]

    def step(x):
        return gradients(strategy.experimental_split_to_logical_devices(x, shards))

    of_replicas = strategy.experimental_distribute_values_from_function(
        lambda context: images[context.replica_id_in_sync_group]
    )
    got = [strategy.experimental_local_results(value) for value in strategy.run(step, (of_replicas,))]
    for replica, rows in enumerate(images):
        assert_close([values[replica] for values in got], gradients(jnp.asarray(rows)), 1e-4, 1e-4)


@pytest.mark.parametrize("num_rows", [5, pytest.param(11, marks=pytest.mark.long)])
def test_embeddings_equal_one_device(num_rows):
    """XLA would count the row that pads the last replica's."""

    def trained(strategy):
        keras.utils.set_random_seed(0)
        with strategy.scope():
            layers = [keras.Input((2,), dtype="int32"), keras.layers.Embedding(3, 4), keras.layers.Dense(2)]
            model = keras.Sequential(layers)
            model.compile(keras.optimizers.SGD(0.5), "mse")
        ids = np.random.default_rng(1).integers(0, 3, (num_rows, 2))
        model.fit(ids, np.ones((num_rows, 2, 2), np.float32), batch_size=num_rows, verbose=0)
        return [np.asarray(v.value) for v in model.trainable_variables]

    assert_close(trained(tpu_strategy(2, 2)), trained(rx.MirroredStrategy(["cpu:0"])), 1e-5)

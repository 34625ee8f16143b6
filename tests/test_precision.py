"""``rx.Precision``: the dtypes, and the numbers of casts that are written by hand."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from checks import assert_close, message
from replicax._src.tracing import gathers

CPUS = [f"cpu:{i}" for i in range(4)]
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(13, 5)).astype(np.float32)
Y = RANDOM.normal(size=(13,)).astype(np.float32)
W = RANDOM.normal(size=(5,)).astype(np.float32)
HALF = rx.Precision("bfloat16")


def losses_of(w, x):
    assert w.dtype == x.dtype == jnp.bfloat16
    return jnp.tanh(x @ w)


def by_hand(w, x, y):
    predictions = jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)
    return (predictions - y) ** 2


def test_only_floating_arrays_are_cast():
    tree = {"f": np.ones(2), "i": np.arange(2), "b": jnp.array(True), "c": jnp.ones(2, jnp.complex64)}
    tree |= {"key": jax.random.key(0), "none": None, "text": "x", "number": 1.5, "variable": rx.Variable(1.0)}
    cast = HALF.cast_to_compute(tree)
    assert cast["f"].dtype == cast["variable"].dtype == jnp.bfloat16
    for name in ("i", "b", "c", "key", "none", "text", "number"):
        assert cast[name] is tree[name]
    assert HALF.cast_to_params(cast)["f"].dtype == HALF.cast_to_output(cast)["f"].dtype == jnp.float32


def test_dtypes_may_be_chosen():
    precision = rx.Precision(jnp.bfloat16, params="bfloat16", output=np.float32)
    assert precision == rx.Precision("bfloat16", "bfloat16", "float32")
    assert precision.cast_to_params(np.ones(1, np.float32)).dtype == jnp.bfloat16


def test_gradients_have_the_dtype_of_parameters_and_equal_hand_written_casts():
    def loss(w):
        return jnp.mean((HALF(losses_of)(w, X) - Y) ** 2)

    value, gradient = jax.value_and_grad(loss)(W)
    expected, expected_gradient = jax.value_and_grad(lambda w: jnp.mean(by_hand(w, X, Y)))(W)
    assert gradient.dtype == value.dtype == jnp.float32
    assert float(value) == float(expected)
    assert gradient.tolist() == expected_gradient.tolist()


def trained(hidden_of, number, options):
    """One step on two replicas. Returns the loss and the variables."""
    strategy = rx.MirroredStrategy(CPUS[:2], **options)
    with strategy.scope():
        w, v = rx.Variable(np.tile(W[:, None], 4) * [1, 2, 3, 4]), rx.Variable(W[:4])

    def sums(batch):
        x, y = batch
        with rx.GradientTape() as tape:
            hidden = hidden_of(w.value, x)
            assert hidden.dtype == jnp.float32
            loss = jnp.sum((hidden @ v.value - y) ** 2)
        return (loss, tape.gradient(loss, [w, v])), x.shape[0]

    def step(batch):
        loss, gradients = rx.experimental.accumulate(number)(sums)(batch)
        totals = rx.get_replica_context().all_reduce("SUM", gradients)
        for variable, total in zip((w, v), totals, strict=True):
            assert total.dtype == jnp.float32
            variable.assign_sub(0.1 * total)
        return loss

    (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((X, Y)).batch(13))
    loss = strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
    return float(loss), w.numpy(), v.numpy()


@pytest.mark.parametrize(
    ("options", "number"),
    [
        ({}, 2),
        ({"shard_state": "all"}, 1),
        pytest.param({}, 1, marks=pytest.mark.rest),
        pytest.param({"shard_state": "all"}, 2, marks=pytest.mark.rest),
    ],
)
def test_in_run_with_micro_batches(options, number, monkeypatch):
    monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1)

    def by_hand(w, x):
        return jnp.tanh(x.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).astype(jnp.float32)

    got = trained(HALF(lambda w, x: jnp.tanh(x @ w)), number, options)
    expected = trained(by_hand, number, options)
    assert_close(got, expected, 0)
    full = trained(lambda w, x: jnp.tanh(x @ w), number, options)
    assert got[0] != full[0]
    assert_close(got[0], full[0], 0.02)  # bfloat16 has 8 bits


def test_functional_state_sums_gradients_in_float32():
    strategy = rx.MirroredStrategy(CPUS)
    optimizer = optax.chain(rx.optax.aggregate_gradients(), optax.adam(0.1))

    def step(state, batch):
        w, slots = state
        x, y = batch

        def loss_of(w):
            return rx.nn.compute_average_loss((HALF(losses_of)(w, x) - y) ** 2)

        loss, gradient = jax.value_and_grad(loss_of)(w)
        updates, slots = optimizer.update(gradient, slots, w)
        return (optax.apply_updates(w, updates), slots), loss

    state = strategy.replicate((W, optimizer.init(W)))
    (batch,) = strategy.experimental_distribute_dataset(rx.data.from_arrays((X[:12], Y[:12])).batch(12))
    (w, _), _ = strategy.run(step, args=(state, batch))
    arguments = [*jax.tree.leaves(state), *(leaf.stored for leaf in batch)]
    arguments = [a.stored if isinstance(a, rx.DistributedValues) else a for a in arguments]
    text = strategy.runner.last_launcher.lower(arguments).as_text()
    sums = re.findall(r"all_reduce.*?-> tensor<(?:\d+x)*(\w+)>", text, re.DOTALL)
    assert sums
    assert set(sums) == {"f32"}
    plain = optax.adam(0.1)
    gradient = jax.grad(lambda w: jnp.mean(by_hand(w, X[:12], Y[:12])))(W)
    updates, _ = plain.update(gradient, plain.init(W), W)
    assert_close(np.asarray(strategy.experimental_local_results(w)[0]), np.asarray(W + updates), 1e-3, 1e-4)


def test_modules_of_nnx():
    model = nnx.Linear(5, 1, rngs=nnx.Rngs(0))
    graph, params = nnx.split(model, nnx.Param)

    def loss(params, x):
        return jnp.mean(HALF(lambda params, x: nnx.merge(graph, params)(x))(params, x) ** 2)

    value, gradients = jax.value_and_grad(loss)(params, X)
    assert value.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {np.dtype(np.float32)}
    kernel = model.kernel.get_value()
    expected = (X.astype(jnp.bfloat16) @ kernel.astype(jnp.bfloat16)).astype(jnp.float32)
    assert float(value) == pytest.approx(float(jnp.mean(expected**2)), rel=1e-6)


def test_float16_needs_a_scaled_loss():
    message(rx.errors.UnsupportedError, lambda: rx.Precision("float16"), "LossScaleOptimizer", "bfloat16")


@pytest.mark.parametrize("dtype", ["int8", "half a float", None, 16])
def test_other_dtypes_are_refused(dtype):
    message(rx.errors.InvalidArgumentError, lambda: rx.Precision(dtype), repr(dtype))
    message(rx.errors.InvalidArgumentError, lambda: rx.Precision("bfloat16", output=dtype), repr(dtype))

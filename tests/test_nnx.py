"""flax nnx modules as arguments of ``run``."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx

X = np.random.default_rng(0).normal(size=(9, 3)).astype("f")
Y = X[:, :1] * 2


class Net(nnx.Module):
    def __init__(self, rngs, dropout=0.0):
        self.first = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, momentum=0.5, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)
        self.last = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x, use_norm=False):
        x = self.first(x)
        x = self.norm(x) if use_norm else x
        return self.last(self.drop(nnx.relu(x)))


def make(dropout=0.0, head=None):
    model = Net(nnx.Rngs(0), dropout)
    chain = [optax.adam(1e-2)] if head is None else [head, optax.adam(1e-2)]
    return model, nnx.Optimizer(model, optax.chain(*chain), wrt=nnx.Param)


def step(model, optimizer, batch, use_norm=False):
    x, y = batch

    def loss(model):
        return rx.nn.compute_average_loss(jnp.sum((model(x, use_norm) - y) ** 2, axis=-1))

    value, gradients = nnx.value_and_grad(loss)(model)
    optimizer.update(model, gradients)
    return value


def batches(strategy, size=5):
    return list(strategy.experimental_distribute_dataset(rx.data.from_arrays((X, Y)).batch(size)))


def test_errors_name_arguments_beside_a_module_and_its_state():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, _ = make()
    ids = np.array([2**40])
    with pytest.raises(rx.errors.NarrowingError, match=r"^args\[1\]\['ids'\] has"):
        strategy.run(lambda model, batch: model(batch["x"]), (model, {"x": X, "ids": ids}))
    with pytest.raises(rx.errors.NarrowingError, match=r"^closure\['ids'\] has"):
        strategy.run(lambda model, x: model(x) + ids[0], (model, X))
    model.last.bias.set_value(np.array([1e300]))
    with pytest.raises(rx.errors.NarrowingError, match=r"^modules\[0\]\['last'\]\['bias'\].* has"):
        strategy.run(lambda model, x: model(x), (model, X))
    model.last.bias.set_value(jnp.full(1, jnp.nan))
    with pytest.raises(rx.errors.NotFiniteError, match=r"from modules\[0\]\['last'\]\['bias'\]"):
        strategy.run(lambda model, x: model(x), (model, X), options=rx.RunOptions(check_finite=True))


@pytest.mark.rest
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_training_equals_one_device_on_uneven_batches(num_replicas):
    def train(strategy):
        model, optimizer = make(head=rx.optax.aggregate_gradients())
        losses = []
        for batch in batches(strategy):
            losses.append(float(strategy.reduce("SUM", strategy.run(step, (model, optimizer, batch)), None)))
        return losses, jax.tree_util.tree_leaves(nnx.state(model, nnx.Param)), optimizer.step.get_value()

    losses, params, count = train(rx.OneDeviceStrategy("cpu:0"))
    ours, our_params, our_count = train(rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)]))
    np.testing.assert_allclose(ours, losses, rtol=1e-5)  # sums in another order
    for a, b in zip(our_params, params, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)  # Adam divides by small roots
    assert int(our_count) == int(count) == 2


def test_moving_statistics_are_averaged_over_replicas():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = make(head=rx.optax.aggregate_gradients())
    kernel, bias = np.asarray(model.first.kernel.get_value()), np.asarray(model.first.bias.get_value())
    strategy.run(lambda m, o, b: step(m, o, b, True), (model, optimizer, batches(strategy, 8)[0]))
    hidden = X[:8] @ kernel + bias
    expected = 0.5 * np.mean([hidden[:4].mean(0), hidden[4:].mean(0)], axis=0)
    np.testing.assert_allclose(model.norm.mean.get_value(), expected, rtol=1e-5, atol=1e-6)


def test_dropout_differs_between_replicas_and_advances():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    ones = strategy.replicate(np.ones(64, "f"))
    first, second = (
        [np.asarray(v) for v in strategy.run(lambda m, x: m(x), (model, ones)).values] for _ in range(2)
    )
    assert not np.array_equal(first[0], first[1])
    assert not np.array_equal(first[0], second[0])


def test_unsummed_gradients_raise_and_do_not_change_the_module():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = make()
    before = [np.asarray(v) for v in jax.tree_util.tree_leaves(nnx.state(model))[:1]]
    with pytest.raises(rx.errors.DivergenceError, match="aggregate_gradients"):
        strategy.run(step, (model, optimizer, batches(strategy)[0]))
    after = [np.asarray(v) for v in jax.tree_util.tree_leaves(nnx.state(model))[:1]]
    np.testing.assert_array_equal(before[0], after[0])


def test_donation_beside_a_module_raises_and_donates_nothing():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, _ = make()
    state = strategy.replicate(np.ones((2, 3), "f"))
    with pytest.raises(rx.errors.UnsupportedError, match=r"nnx\.split"):
        strategy.run(lambda m, x: m(x), (model, state), options=rx.RunOptions(donate_args=(1,)))
    assert np.asarray(state).tolist() == np.ones((2, 3)).tolist()


def test_closed_over_module_must_be_an_argument():
    model, strategy = Net(nnx.Rngs(0)), rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(ValueError, match="different trace level") as caught:
        strategy.run(lambda x: nnx.grad(lambda m: jnp.sum(m(x)))(model), (X,))
    notes = "\n".join(caught.value.__notes__)
    assert "as arguments: strategy.run(step, args=(model, optimizer, batch))" in notes


def test_state_split_outside_the_loop():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, _ = make()
    graph, state = nnx.split(model)
    state = strategy.replicate(
        jax.tree_util.tree_map(lambda a: a, nnx.to_pure_dict(nnx.state(model, nnx.Param)))
    )

    def forward(state, x):
        return jnp.sum(x @ state["first"]["kernel"])

    result = strategy.run(forward, (state, np.ones((2, 3), "f")))
    expected = float(np.sum(np.ones((2, 3)) @ np.asarray(model.first.kernel.get_value())))
    assert float(result.values[0]) == pytest.approx(expected, rel=1e-5)
    assert graph is not None

"""flax nnx modules as arguments of ``run``."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import replicax as rx
from replicax._src.frameworks import nnx as nnx_framework

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


@pytest.mark.parametrize("rows", [8, 7])
def test_moving_statistics_are_averaged_over_the_rows_of_all_replicas(rows):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = make(head=rx.optax.aggregate_gradients())
    kernel, bias = np.asarray(model.first.kernel.get_value()), np.asarray(model.first.bias.get_value())
    strategy.run(lambda m, o, b: step(m, o, b, True), (model, optimizer, batches(strategy, rows)[0]))
    hidden = X[:rows] @ kernel + bias
    variance = (4 * hidden[:4].var(0) + (rows - 4) * hidden[4:].var(0)) / rows
    np.testing.assert_allclose(model.norm.mean.get_value(), 0.5 * hidden.mean(0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.norm.var.get_value(), 0.5 + 0.5 * variance, rtol=1e-5, atol=1e-6)


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


# --- between the steps ------------------------------------------------------------------------------------


def leaves_of(*modules):
    return [np.asarray(leaf) for leaf in jax.tree.leaves(nnx.state(modules)) if not is_key(leaf)]


def is_key(leaf):
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def trained(strategy, changes=()):
    """Trains on the same batches. ``changes`` are called with the model and its optimizer between the steps."""
    model, optimizer = make(head=rx.optax.aggregate_gradients())
    batch = batches(strategy, 8)[0]
    for change in (*changes, None):
        strategy.run(step, (model, optimizer, batch))
        if change is not None:
            change(model, optimizer)
    return model, optimizer


def test_the_next_step_moves_no_state_between_devices():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = trained(strategy)
    batch = batches(strategy, 8)[0]
    strategy.run(step, (model, optimizer, batch))
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        strategy.run(step, (model, optimizer, batch))
    kernel = model.first.kernel.get_value()
    with pytest.raises(Exception, match="transfer"), jax.transfer_guard_device_to_device("disallow_explicit"):
        strategy.topology.put_whole(jnp.copy(kernel))  # the guard works on these devices


def test_a_module_holds_arrays_of_one_device_that_combine_with_others_there():
    strategy = rx.MirroredStrategy(["cpu:1", "cpu:0"])
    model, _ = trained(strategy)
    device = strategy.topology.devices[0]
    assert {leaf.device for leaf in jax.tree.leaves(nnx.state(model)) if not is_key(leaf)} == {device}
    assert model(jax.device_put(X, device)).shape == (9, 1)


def replaced_head(model, optimizer):
    model.last = nnx.Linear(4, 1, rngs=nnx.Rngs(7))


def set_kernel(model, optimizer):
    model.first.kernel.set_value(model.first.kernel.get_value() * 2)


def halved_in_jit(model, optimizer):
    nnx.jit(lambda model: nnx.update(model, jax.tree.map(lambda a: a / 2, nnx.state(model, nnx.Param))))(
        model
    )


def copied_bias(model, optimizer):
    model.norm.bias.set_value(model.first.bias.get_value())  # two variables hold one array


def host_value(model, optimizer):
    model.last.bias.set_value(np.full(1, 0.25, np.float32))


def updated_outside(model, optimizer):
    optimizer.update(model, jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param)))


@pytest.mark.parametrize("changes", [
    (set_kernel, replaced_head, host_value),
    pytest.param((copied_bias, updated_outside, copied_bias), marks=pytest.mark.rest),
    pytest.param((halved_in_jit, set_kernel), marks=pytest.mark.rest),
])  # fmt: skip
def test_changes_between_steps_count(changes):
    expected = leaves_of(*trained(rx.OneDeviceStrategy("cpu:0"), changes))
    got = leaves_of(*trained(rx.MirroredStrategy(["cpu:0", "cpu:1"]), changes))
    for ours, one in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-5)


def test_static_attributes_count_in_the_next_step():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, ones = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), strategy.replicate(np.ones(64, "f"))

    def zeros():
        return int((np.asarray(strategy.run(lambda m, x: m(x), (model, ones)).values[0]) == 0).sum())

    found = [zeros(), (model.eval(), zeros())[1], (model.train(), zeros())[1]]
    model.rate = 1.0
    assert found[0] > 0
    assert found[1] == 0
    assert found[2] > 0
    assert zeros() == 64
    model.rate = True  # equal to 1.0, and another constant
    assert zeros() == 64


def test_two_strategies_alternate():
    strategies = [
        rx.MirroredStrategy(["cpu:0", "cpu:1"]),
        rx.OneDeviceStrategy("cpu:2"),
        rx.MirroredStrategy(["cpu:2", "cpu:3"]),
    ]
    model, optimizer = make(head=rx.optax.aggregate_gradients())
    for strategy in strategies * 2:
        strategy.run(step, (model, optimizer, batches(strategy, 8)[0]))
    other, other_optimizer = make(head=rx.optax.aggregate_gradients())
    for _ in range(6):
        strategies[1].run(step, (other, other_optimizer, batches(strategies[1], 8)[0]))
    for ours, one in zip(leaves_of(model), leaves_of(other), strict=True):
        np.testing.assert_allclose(ours, one, rtol=1e-4, atol=1e-5)


def test_nothing_keeps_the_arrays_of_modules_that_are_gone():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])

    def large():
        gc.collect()
        return sum(array.nbytes for array in jax.live_arrays() if array.shape == (64, 257))

    def train():
        model = nnx.Linear(64, 257, rngs=nnx.Rngs(0))
        optimizer = nnx.Optimizer(
            model, optax.chain(rx.optax.aggregate_gradients(), optax.adam(1e-2)), wrt=nnx.Param
        )
        for _ in range(3):
            strategy.run(
                lambda m, o: o.update(m, nnx.grad(lambda m: jnp.sum(m(jnp.ones(64)) ** 2))(m)),
                (model, optimizer),
            )
        return model, optimizer

    model, optimizer = train()
    size = model.kernel.get_value().nbytes
    assert large() >= 3 * size
    del optimizer
    assert large() <= size
    del model
    assert large() == 0


def test_deleted_arrays_of_a_module_are_an_error():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model, optimizer = trained(strategy)
    jax.jit(lambda kernel: kernel + 1, donate_argnums=0)(model.first.kernel.get_value())
    if not model.first.kernel.get_value().is_deleted():
        model.first.kernel.get_value().delete()
    with pytest.raises((RuntimeError, ValueError), match="deleted"):
        strategy.run(step, (model, optimizer, batches(strategy, 8)[0]))


class Parts(nnx.Module):
    """What ``nnx.split`` takes apart: containers, shared and plain parts."""

    def __init__(self, with_unknown):
        rngs = nnx.Rngs(0, noise=1)
        self.linear = nnx.Linear(2, 2, rngs=rngs)
        self.listed = nnx.List([self.linear, nnx.LayerNorm(2, rngs=rngs)])
        self.named = nnx.Dict(a=nnx.Param(jnp.ones(2)), b=nnx.Variable(jnp.zeros(3)))
        self.tied = self.linear.kernel
        self.twice = nnx.List([self.tied, self.tied, self.named["a"], self.named["a"]])
        self.count = nnx.Variable(jnp.uint32(3), note="a")
        self.rngs, self.shape, self.call = rngs, (2, 3), jnp.tanh
        self.metric = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
        if with_unknown:
            self.plain = nnx.data(jnp.arange(3.0))
            self.tree = nnx.Variable({"a": jnp.ones(1), "b": jnp.ones(2)})

    def __call__(self, x):
        self.count.set_value(self.count.get_value() + 1)
        self.named["b"].set_value(self.named["b"].get_value() + 1)
        return self.listed[1](self.linear(x))


@pytest.mark.parametrize("with_unknown", [False, True])
def test_all_kinds_of_parts_are_split_as_nnx_splits_them(with_unknown):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    model = Parts(with_unknown)
    for number in range(3):
        graph, state = nnx.split((model,))
        split, arrays, variables = nnx_framework._splits.of((model,))
        assert split.definition.graph == graph
        assert all(a is b for a, b in zip(arrays, jax.tree.leaves(state), strict=True))
        assert (variables is None) == with_unknown
        strategy.run(lambda m, x: m(x), (model, np.ones((4, 2), "f")))
        assert int(model.count.get_value()) == 4 + number
        assert model.named["b"].get_value().tolist() == [number + 1.0] * 3
    model.count.set_metadata(note="b")
    assert nnx_framework._splits.of((model,))[0].definition.graph == nnx.split((model,))[0]

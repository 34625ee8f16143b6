"""A step of a flax nnx model: modules as arguments of ``run``, beside a hand-written ``shard_map`` of their state."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import replicax as rx
import rounds

BATCH, CLASSES, AXIS = 32, 5, "replica"


class Block(nnx.Module):
    """A residual block with batch normalization over all replicas."""

    def __init__(self, inputs: int, outputs: int, stride: int, rngs: nnx.Rngs):
        self.first = nnx.Conv(inputs, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.first_norm = nnx.BatchNorm(outputs, momentum=0.9, axis_name=AXIS, rngs=rngs)
        self.second = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.second_norm = nnx.BatchNorm(outputs, momentum=0.9, axis_name=AXIS, rngs=rngs)
        self.skip = nnx.Conv(inputs, outputs, (1, 1), strides=stride, rngs=rngs) if stride > 1 else None

    def __call__(self, x):
        y = nnx.relu(self.first_norm(self.first(x)))
        y = self.second_norm(self.second(y))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """A small ResNet with dropout, whose state with Adam's is 66 arrays."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.blocks = nnx.List([Block(8, 8, 1, rngs), Block(8, 16, 2, rngs)])
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, x):
        x = nnx.relu(self.stem(x))
        for block in self.blocks:
            x = block(x)
        return self.head(self.dropout(x.mean((1, 2))))


def main(num_rounds: int) -> None:
    """Prints µs per step."""
    strategy = rx.MirroredStrategy()
    contestants = {"by hand": by_hand(strategy), "strategy.run": through_run(strategy)}
    timings = rounds.compare(contestants, rounds=num_rounds, steps=30)
    leaves = len(jax.tree.leaves(nnx.state(_made(optax.adam(3e-3)))))
    rounds.report(f"flax nnx: a ResNet of {leaves} arrays, batch {BATCH}, Adam", timings, "by hand")


def _made(chain: optax.GradientTransformation) -> tuple[ResNet, nnx.Optimizer]:
    model = ResNet(nnx.Rngs(0, dropout=1))
    model.train()
    return model, nnx.Optimizer(model, chain, wrt=nnx.Param)


def _batch() -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 12, 12, 3)).astype("float32"), random.integers(0, CLASSES, BATCH)


def by_hand(strategy: rx.Strategy) -> Callable[[int], None]:
    """The state is split once, and stays on the devices."""
    mesh = jax.sharding.Mesh(np.array(strategy.topology.devices), (AXIS,))
    definition, state = nnx.split(_made(optax.adam(3e-3)))
    held = jax.device_put(state, NamedSharding(mesh, P()))
    batch = jax.device_put(_batch(), NamedSharding(mesh, P(AXIS)))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P(AXIS)), out_specs=P(), check_vma=False)
    def step(state, batch):
        model, optimizer = nnx.merge(definition, state)
        x, y = batch

        def loss_of(model):
            return jnp.sum(optax.softmax_cross_entropy_with_integer_labels(model(x), y)) / BATCH

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, jax.lax.psum(gradients, AXIS))
        return nnx.state((model, optimizer)), jax.lax.psum(loss, AXIS)

    def run(steps: int) -> None:
        nonlocal held
        for _ in range(steps):
            held, loss = step(held, batch)
            float(loss)

    return run


def through_run(strategy: rx.Strategy) -> Callable[[int], None]:
    """``run`` gets the modules, and updates them."""
    model, optimizer = _made(optax.chain(rx.optax.aggregate_gradients(), optax.adam(3e-3)))
    (batch,) = strategy.experimental_distribute_dataset([_batch()])

    def step(model, optimizer, batch):
        x, y = batch

        def loss_of(model):
            losses = optax.softmax_cross_entropy_with_integer_labels(model(x), y)
            return rx.nn.compute_average_loss(losses)

        loss, gradients = nnx.value_and_grad(loss_of)(model)
        optimizer.update(model, gradients)
        return rx.get_replica_context().all_reduce("sum", loss)

    def run(steps: int) -> None:
        for _ in range(steps):
            float(strategy.run(step, args=(model, optimizer, batch)))

    return run

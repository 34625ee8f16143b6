"""Computes operations that mix rows, and their gradients, in each form that replicas use, and on one device."""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import keras
import numpy as np

import replicax as rx
from fuzz.operations import FEATURES, OPERATIONS
from replicax._src.tracing.row_partitioner.rules import NotByRowsError
from splitting import run_by_rows

LIMIT = 1e-4
ZERO = 1e-12
DEVICES = (2, 3, 8)
ROWS = (24, 11)
"""A batch that divides, and one that does not: of 11 rows on 8 devices two have none in `fit`."""

KERNEL = np.eye(FEATURES, dtype=np.float32) + np.random.default_rng(0).integers(-1, 2, (4, 4)) / 4


@functools.cache
def data(num_rows, is_exact=True):
    """Rows that float32 holds exactly, also after a layer; or rows as users have."""
    random = np.random.default_rng(num_rows)
    if is_exact:
        return random.integers(-6, 7, (num_rows, FEATURES)).astype(np.float32) / 4
    return random.normal(size=(num_rows, FEATURES)).astype(np.float32)


def loss(name, kernel, x):
    """The operation on the output of a layer for the rows: (a sum in which each entry has its own weight, the entries
    as a vector).

    The gradient goes through both, and does not depend on the kernel: after a few steps the kernel is their sum.
    """
    kernel = KERNEL.astype(x.dtype) + (kernel - jax.lax.stop_gradient(kernel))
    y = OPERATIONS[name](x @ kernel).ravel()
    y = y if jnp.issubdtype(y.dtype, jnp.floating) and y.dtype.itemsize >= 4 else y.astype(x.dtype)
    return jnp.sum(y * jnp.cos(jnp.arange(len(y), dtype=y.dtype))), y


def of_all(names, kernel, x):
    """{name: (value, gradient)}."""
    found = {}
    for name in names:
        gradient, y = jax.grad(functools.partial(loss, name), has_aux=True)(kernel, x)
        found[name] = y, gradient
    return found


@functools.cache
def compiled_for_one_device(names):
    return jax.jit(functools.partial(of_all, names))


def by_one_device(names, x):
    """{name: (value, gradient)} of plain JAX."""
    kernel = np.zeros((FEATURES, FEATURES), x.dtype)
    return jax.tree_util.tree_map(np.asarray, compiled_for_one_device(tuple(names))(kernel, x))


@functools.cache
def exactly(names, num_rows, first, last, is_exact):
    """The same in float64, for some of the rows."""
    with jax.enable_x64(True):
        return by_one_device(names, data(num_rows, is_exact).astype(np.float64)[first:last])


class Mixing(keras.Model):
    """A model with an operation over the batch for each name, and a kernel before each."""

    def __init__(self, names):
        super().__init__()
        self.ops = names
        self.kernels = [self.add_weight(shape=(FEATURES, FEATURES), initializer="zeros") for _ in names]

    def call(self, x):
        outputs = {}
        for name, kernel in zip(self.ops, self.kernels):
            of_op, outputs[name] = loss(name, jnp.asarray(kernel.value), x)
            self.add_loss(of_op)
        return outputs


def compiled(names, strategy, **options):
    with strategy.scope():
        model = Mixing(names)
        model.compile(keras.optimizers.SGD(1.0), **options)
    return model


def by_fit(names, x, strategy, **options):
    """{name: (gradient,)}, the mean of two steps."""
    model = compiled(names, strategy, **options)
    model.fit(np.concatenate([x, x]), batch_size=len(x), shuffle=False, verbose=0)
    return {name: (-np.asarray(kernel.value) / 2,) for name, kernel in zip(names, model.kernels)}


def in_a_loop(names, x, strategy):
    """The same with both steps in one program. (Not on CPUs, where there is a convolution.)"""
    return by_fit(names, x, strategy, steps_per_execution=2)


def by_predict(names, x, strategy):
    """{name: (value,)}."""
    results = compiled(names, strategy).predict(x, batch_size=len(x), verbose=0)
    return {name: (value,) for name, value in results.items()}


def by_run(names, x, strategy):
    """For each replica {name: (value, gradient)} of its rows."""

    def step(x):
        return of_all(names, jnp.zeros((FEATURES, FEATURES)), x)

    (batch,) = strategy.experimental_distribute_dataset([x])
    found = strategy.run(step, (batch,))
    local = {name: [strategy.experimental_local_results(y) for y in pair] for name, pair in found.items()}
    return [
        {name: tuple(values[replica] for values in pair) for name, pair in local.items()}
        for replica in range(strategy.num_replicas_in_sync)
    ]


def split_by_rows(call, names, x, num_replicas):
    """{name: the result of ``call``, of splitting.py, for its gradient}; without the operations that are not split by
    rows."""
    sizes = [len(part) for part in np.array_split(x, num_replicas)]
    found = {}
    for name in names:

        def gradient(kernel, x, name=name):
            return jax.grad(lambda kernel: loss(name, kernel, x)[0])(kernel)

        with contextlib.suppress(NotByRowsError):
            found[name] = call(gradient, np.zeros((FEATURES, FEATURES), np.float32), x, sizes)
    return found


def by_rows(names, x, num_replicas):
    """{name: (gradient,)} of the programs that processes split by rows; without those that are not split."""
    found = split_by_rows(run_by_rows, names, x, num_replicas)
    return {name: (results[0],) for name, (results, _) in found.items()}


def places(way, num_rows, num_devices):
    """The rows of each result: those of each replica in `run`, otherwise all."""
    sizes = [len(part) for part in np.array_split(np.arange(num_rows), num_devices)]
    ends = list(itertools.accumulate(sizes))
    return [(end - size, end) for end, size in zip(ends, sizes)] if way == "run" else [(0, num_rows)]


def difference(got, wanted):
    """The largest difference, relative to the array's largest absolute value; infinity if a value that is not finite
    differs."""
    got, wanted = np.asarray(got, np.float64), np.asarray(wanted, np.float64)
    is_finite = np.isfinite(wanted)
    if got.shape != wanted.shape or not np.array_equal(got[~is_finite], wanted[~is_finite], equal_nan=True):
        return np.inf
    apart = float(np.max(np.abs(got - wanted)[is_finite], initial=0.0))
    if np.isnan(apart):
        return np.inf
    # A value that is zero except for float64's rounding, such as the gradient of a mean over one row, has the size of
    # the operands: 1.
    largest = float(np.max(np.abs(wanted[is_finite]), initial=0.0))
    return apart / (largest if largest > ZERO else 1.0)


PARTS = {
    "fit": slice(1, 2),
    "loop": slice(1, 2),
    "predict": slice(0, 1),
    "run": slice(0, 2),
    "by_rows": slice(1, 2),
}
"""Of (value, gradient), what each way gives."""


def differences(way, names, num_devices, num_rows, is_exact=True):
    """{name: difference of a way on several devices to one device in float64}."""
    x, names = data(num_rows, is_exact), tuple(names)
    if way == "by_rows":
        got = [by_rows(names, x, num_devices)]
    else:
        strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_devices)])
        compute = {"fit": by_fit, "loop": in_a_loop, "predict": by_predict, "run": by_run}[way]
        got = compute(names, x, strategy)
        got = got if way == "run" else [got]
    return _worst(way, got, names, num_devices, num_rows, is_exact)


def rounding(way, names, num_devices, num_rows, is_exact=True):
    """{name: difference of one device in float32}."""
    x = data(num_rows, is_exact)
    got = [by_one_device(names, x[a:b]) for a, b in places(way, num_rows, num_devices)]
    got = [{name: pair[PARTS[way]] for name, pair in found.items()} for found in got]
    return _worst(way, got, tuple(names), num_devices, num_rows, is_exact)


def _worst(way, got, names, num_devices, num_rows, is_exact):
    wanted = [exactly(names, num_rows, *place, is_exact) for place in places(way, num_rows, num_devices)]
    return {
        name: max(
            difference(one, other)
            for here, there in zip(got, wanted, strict=True)
            for one, other in zip(here[name], there[name][PARTS[way]], strict=True)
        )
        for name in got[0]
    }

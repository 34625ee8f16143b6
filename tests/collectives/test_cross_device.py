"""Cross-device operations: all give the same numbers, and a user's own are used wherever values are reduced."""

import functools
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax import errors
from replicax._src.collectives.in_replica import Packing

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]


class Own(rx.CrossDeviceOps):
    """Adds in its own way and records its arguments."""

    def __init__(self):
        self.calls = []

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        self.calls.append((reduce_op, len(per_replica_value.values)))
        total = functools.reduce(jnp.add, per_replica_value.values[::-1])
        return total / len(per_replica_value.values) if reduce_op is rx.ReduceOp.MEAN else total


class Doubling(rx.CrossDeviceOps):
    """Returns twice the sum, to show that its result is used."""

    def batch_reduce_implementation(self, reduce_op, value_destination_pairs, options):
        return [2 * sum(value.values) for value, _ in value_destination_pairs]

    def reduce_implementation(self, reduce_op, per_replica_value, destinations, options):
        return 2 * sum(per_replica_value.values)


OPS = {
    "default": lambda: None,
    "nccl": rx.NcclAllReduce,
    "nccl, 2 packs": lambda: rx.NcclAllReduce(num_packs=2),
    "hierarchical": rx.HierarchicalCopyAllReduce,
    "hierarchical, 0 packs": lambda: rx.HierarchicalCopyAllReduce(num_packs=0),
    "one device": rx.ReductionToOneDevice,
    "one device, named": lambda: rx.ReductionToOneDevice(reduce_to_device="cpu:0"),
    "one device, own sum": lambda: rx.ReductionToOneDevice(
        accumulation_fn=lambda values: jnp.sum(jnp.stack(values), 0)
    ),
    "base class": rx.CrossDeviceOps,
    "own": Own,
}


def values_of(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(4.0, dtype=np.float32) * (c.replica_id_in_sync_group + 1)
    )


@pytest.mark.parametrize("name", OPS)
def test_all_give_the_same_numbers(name):
    strategy = rx.MirroredStrategy(DEVICES, cross_device_ops=OPS[name]())
    values = values_of(strategy)
    assert np.asarray(strategy.reduce("SUM", values, axis=None)).tolist() == [0, 6, 12, 18]
    assert np.asarray(strategy.reduce("MEAN", values, axis=None)).tolist() == [0, 2, 4, 6]
    assert float(strategy.reduce("SUM", values, axis=0)) == 36
    assert float(strategy.reduce("MEAN", values, axis=0)) == 3

    def step(x):
        context = rx.get_replica_context()
        total, mean = context.all_reduce("SUM", (x, x[0])), context.all_reduce("MEAN", {"x": x})
        merged = context.merge_call(lambda s, x: s.reduce("MEAN", x, axis=0), (x,))
        slices = context.all_reduce("SUM", rx.IndexedSlices(x[None], jnp.array([1]), (2, 4)))
        return total, mean, merged, slices.to_dense()

    (total, first), mean, merged, slices = strategy.run(step, (values,))
    for r in range(3):
        assert np.asarray(total.values[r]).tolist() == [0, 6, 12, 18]
        assert float(first.values[r]) == 0
        assert np.asarray(mean["x"].values[r]).tolist() == [0, 2, 4, 6]
        assert float(merged.values[r]) == 3
        assert np.asarray(slices.values[r]).tolist() == [[0] * 4, [0, 6, 12, 18]]


@pytest.mark.parametrize("kind", [rx.NcclAllReduce, rx.HierarchicalCopyAllReduce])
def test_num_packs_is_the_number_of_buffers(kind):
    values = [jnp.float32(number) for number in range(9)]
    communicator = SimpleNamespace(sum=lambda values, options: Packing(options.bytes_per_pack).packs(values))
    packs = kind(num_packs=5).sum_in_replica(communicator, values, None)
    assert list(map(len, packs)) == [2, 2, 2, 2, 1]


@pytest.mark.parametrize("name", OPS)
def test_training_and_variables_are_the_same(name):
    strategy = rx.MirroredStrategy(DEVICES, cross_device_ops=OPS[name]())
    with strategy.scope():
        w = rx.Variable(jnp.ones(4))
        summed = rx.Variable(jnp.zeros(4), aggregation="SUM")

    @rx.function
    def train(x):
        def step(x):
            with rx.GradientTape() as tape:
                loss = jnp.sum(w * w * x)
            (gradient,) = tape.gradient(loss, [w])
            w.assign_sub(0.01 * rx.get_replica_context().all_reduce("SUM", gradient))
            summed.assign_add(x)

        strategy.run(step, (x,))
        return strategy.reduce("MEAN", x, axis=None)

    values = values_of(strategy)
    mean = [train(values) for _ in range(2)][-1]
    x = 6 * np.arange(4.0)
    np.testing.assert_allclose(np.asarray(w), (1 - 0.01 * 2 * x) ** 2, rtol=1e-6)
    np.testing.assert_allclose(np.asarray(summed), 2 * x)
    np.testing.assert_allclose(np.asarray(mean), x / 3)


def test_uneven_values_through_own_operations():
    strategy = rx.MirroredStrategy(DEVICES, cross_device_ops=Own())
    ragged = strategy.experimental_distribute_values_from_function(
        lambda c: np.full(3 - c.replica_id_in_sync_group, 1.0, np.float32)
    )
    assert float(strategy.reduce("SUM", ragged, axis=0)) == 6.0
    assert float(strategy.reduce("MEAN", ragged, axis=0)) == 1.0
    total = strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", jnp.sum(x)), (ragged,))
    assert [float(v) for v in total.values] == [6.0] * 3


def test_own_operations_are_called():
    ops = Own()
    strategy = rx.MirroredStrategy(DEVICES, cross_device_ops=ops)
    strategy.reduce("MEAN", values_of(strategy), axis=None)
    assert ops.calls == [(rx.ReduceOp.MEAN, 3)]
    strategy.run(lambda x: rx.get_replica_context().all_reduce("SUM", [x, x]), (values_of(strategy),))
    assert ops.calls[1:] == [(rx.ReduceOp.SUM, 3)] * 2


def test_own_operations_give_the_numbers():
    keras = pytest.importorskip("keras")
    strategy = rx.MirroredStrategy(DEVICES, cross_device_ops=Doubling())
    values = values_of(strategy)
    with strategy.scope():
        v = rx.Variable(jnp.zeros(4), aggregation="SUM")
        kernel = keras.Variable(np.zeros(4, np.float32))
        optimizer = keras.optimizers.SGD(1.0)

    def step(x):
        v.assign(x)
        optimizer.apply([-x], [kernel])
        return rx.get_replica_context().all_reduce("SUM", x)

    result = strategy.run(step, (values,))
    doubled = [0, 12, 24, 36]
    assert np.asarray(strategy.reduce("SUM", values, axis=None)).tolist() == doubled
    assert np.asarray(result.values[1]).tolist() == doubled
    assert np.asarray(v).tolist() == doubled
    assert np.asarray(kernel.value).tolist() == doubled  # gradients go through it too


@pytest.mark.parametrize("name", [name for name in OPS if name != "default"])
def test_called_directly(name):
    strategy, ops = rx.MirroredStrategy(DEVICES), OPS[name]()
    values = values_of(strategy)
    assert np.asarray(ops.reduce("SUM", values, destinations="cpu:0")).tolist() == [0, 6, 12, 18]
    first, second = ops.batch_reduce("mean", [(values, "cpu:0"), (values, values)])
    assert np.asarray(first).tolist() == np.asarray(second).tolist() == [0, 2, 4, 6]
    assert np.asarray(ops.broadcast(jnp.ones(2), destinations="cpu:0")).tolist() == [1, 1]
    with pytest.raises(errors.InvalidArgumentError, match="'MAX' is not a valid ReduceOp"):
        ops.reduce("MAX", values, "cpu:0")


@pytest.mark.parametrize("kind", [rx.NcclAllReduce, rx.HierarchicalCopyAllReduce])
@pytest.mark.parametrize("num_packs", [-1, 1.5, True, "2"])
def test_bad_num_packs(kind, num_packs):
    with pytest.raises(
        ValueError, match=f"{kind.__name__}: num_packs must be an int of at least 0, got {num_packs!r}"
    ):
        kind(num_packs=num_packs)


def test_other_bad_arguments():
    with pytest.raises(errors.InvalidArgumentError, match="accumulation_fn must be a function"):
        rx.ReductionToOneDevice(accumulation_fn=3)
    with pytest.raises(errors.InvalidArgumentError, match=r"must be an rx.CrossDeviceOps, such as"):
        rx.MirroredStrategy(DEVICES, cross_device_ops="nccl")
    with pytest.raises(errors.InvalidArgumentError, match=r"must be an rx.CrossDeviceOps, such as"):
        rx.MirroredStrategy(DEVICES, cross_device_ops=rx.NcclAllReduce)


@pytest.mark.parametrize("bytes_per_pack", [0, 1, 20, 1 << 20])
def test_packing_does_not_change_numbers(bytes_per_pack):
    strategy = rx.MirroredStrategy(DEVICES)
    options = rx.CommunicationOptions(bytes_per_pack=bytes_per_pack)
    shapes = [(3,), (), (2, 2), (70_000,), (0,), (5,)]

    def step(x):
        leaves = [jnp.full(shape, x[1] + i, jnp.float32) for i, shape in enumerate(shapes)]
        leaves += [jnp.full((2,), 1, jnp.int32), jnp.ones((2,), jnp.float16)]
        return rx.get_replica_context().all_reduce("SUM", leaves, options)

    results = strategy.run(step, (values_of(strategy),))
    for i, shape in enumerate(shapes):
        np.testing.assert_allclose(np.asarray(results[i].values[2]), np.full(shape, 6.0 + 3 * i))
    assert (np.asarray(results[-2].values[0]).tolist(), str(results[-2].dtype)) == ([3, 3], "int32")
    assert (np.asarray(results[-1].values[0]).tolist(), str(results[-1].dtype)) == ([3, 3], "float16")

"""PerReplica and Mirrored: layout, components, printing, conversion, as pytrees, and after donation."""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.devices.topology import Topology
from replicax._src.values.distributed import cut, largest_shape, pad, per_replica_from_components
from replicax.errors import DonatedError, PerReplicaUseError


@pytest.fixture(scope="module")
def strategy():
    return rx.MirroredStrategy(["cpu:2", "cpu:0", "cpu:1"])


@pytest.fixture
def values(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.arange(2.0, dtype=np.float32) + 10 * c.replica_id_in_sync_group
    )


@pytest.fixture
def ragged(strategy):
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.full((c.replica_id_in_sync_group, 2), c.replica_id_in_sync_group, np.int32)
    )


def test_layout(strategy, values):
    assert values.array.shape == (3, 2)
    assert values.array.sharding == strategy.topology.per_replica
    assert values.num_replicas == 3
    assert values.shapes is None
    assert values.dtype == np.float32
    for r, component in enumerate(values.values):
        assert component.devices() == {strategy.extended.worker_devices[r]}
        assert component.tolist() == [10.0 * r, 10.0 * r + 1]
        assert values.component_shape(r) == (2,)


def test_ragged_layout(ragged):
    assert ragged.array.shape == (3, 2, 2)
    assert ragged.shapes == ((0, 2), (1, 2), (2, 2))
    assert [v.shape for v in ragged.values] == [(0, 2), (1, 2), (2, 2)]
    assert ragged.values[2].tolist() == [[2, 2], [2, 2]]
    assert ragged.component_shape(1) == (1, 2)


def test_equal_components_are_stored_once(strategy):
    same = strategy.run(lambda: jnp.arange(2.0))
    assert same.is_equal
    assert same.array.shape == (2,)
    assert same.array.sharding.is_fully_replicated
    assert [v.tolist() for v in same.values] == [[0.0, 1.0]] * 3
    assert [v.devices() for v in same.values] == [{d} for d in strategy.extended.worker_devices]
    assert np.asarray(same).tolist() == [0.0, 1.0]  # one meaning, so it converts
    assert float(same[1] + 1) == 2.0


def test_printing(strategy, values, ragged):
    assert repr(values) == (
        "PerReplica:{\n"
        "  0: array([0., 1.], dtype=float32)\n"
        "  1: array([10., 11.], dtype=float32)\n"
        "  2: array([20., 21.], dtype=float32)\n"
        "}"
    )
    assert "2: array([[2, 2],\n       [2, 2]], dtype=int32)" in repr(ragged)
    assert f"{values}" == str(values) == repr(values)
    assert "Mirrored(" in repr(strategy.replicate(jnp.ones(2)))
    shown = []
    strategy.run(lambda x: shown.append(repr({"x": x})), (values,))
    assert "float32[2]" in shown[0]  # inside it is this replica's array


def test_mirrored(strategy):
    value = strategy.replicate(np.arange(3.0, dtype=np.float32))
    assert isinstance(value, rx.Mirrored)
    assert isinstance(value, rx.DistributedValues)
    assert value.shape == (3,)
    assert value.dtype == np.float32
    assert len(value.values) == 3
    assert [v.devices() for v in value.values] == [{d} for d in strategy.extended.worker_devices]
    assert np.asarray(value).tolist() == [0.0, 1.0, 2.0]
    assert (value * 2).tolist() == [0.0, 2.0, 4.0]
    assert (1 - value).tolist() == [1.0, 0.0, -1.0]
    assert float(jnp.sum(value)) == 3.0
    assert len(value) == 3
    assert [float(x) for x in value] == [0.0, 1.0, 2.0]


def test_replicate_strips_weak_types_and_keeps_dtypes(strategy):
    state = strategy.replicate({"a": 1.5, "b": 2, "c": True, "d": np.float16(1), "e": jnp.bfloat16(2)})
    dtypes = {k: str(v.dtype) for k, v in state.items()}
    assert dtypes == {"a": "float32", "b": "int32", "c": "bool", "d": "float16", "e": "bfloat16"}
    assert not any(v.array.weak_type for v in state.values())


def test_replicate_of_distributed_values_and_variables(strategy):
    with strategy.scope():
        v = rx.Variable([1.0, 2.0])
    again = strategy.replicate([strategy.replicate(jnp.ones(2)), v, strategy.run(lambda: jnp.zeros(2))])
    assert [np.asarray(x).tolist() for x in again] == [[1, 1], [1, 2], [0, 0]]
    with pytest.raises(ValueError, match="pytree of arrays and numbers"):
        strategy.replicate({"name": "text"})
    with pytest.raises(PerReplicaUseError):
        strategy.replicate(strategy.run(lambda: rx.get_replica_context().replica_id_in_sync_group))


def test_as_pytrees(strategy, values, ragged):
    for value in (values, ragged, strategy.replicate(jnp.ones(2))):
        leaves, tree = jax.tree_util.tree_flatten(value)
        again = jax.tree_util.tree_unflatten(tree, leaves)
        assert type(again) is type(value)
        assert [v.tolist() for v in again.values] == [v.tolist() for v in value.values]
        jax.block_until_ready(value)
    doubled = jax.tree_util.tree_map(lambda x: x * 2, values)
    assert [v.tolist() for v in doubled.values] == [[0, 2], [20, 22], [40, 42]]
    through_jit = jax.jit(lambda x: x)(values)
    assert isinstance(through_jit, rx.PerReplica)
    assert through_jit.values[1].tolist() == [10.0, 11.0]


def test_equal_components_have_a_shape_a_dtype_and_dims(strategy):
    for value in (strategy.run(lambda: jnp.ones((2, 3))), strategy.replicate(jnp.ones((2, 3)))):
        assert (value.shape, value.dtype, value.ndim) == ((2, 3), np.float32, 2)
    one = rx.OneDeviceStrategy("cpu:0").run(lambda x: x + 1, args=(jnp.ones(2),))
    assert (one.shape, one.ndim) == ((2,), 1)


def test_the_error_for_a_shape_says_which_replicas_have_what(values, ragged):
    message(
        AttributeError,
        lambda: values.shape,
        "each has float32[2], and they may differ",
        "gather(value, axis=0)",
    )
    said = message(
        AttributeError,
        lambda: ragged.shape,
        "replica 0 has int32[0, 2], replica 1 has int32[1, 2], replica 2",
    )
    assert "run" in said
    assert not hasattr(values, "shape")
    assert (values.ndim, ragged.ndim) == (1, 2)


def test_the_error_for_a_shape_groups_replicas_with_equal_shapes():
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(4)])
    (batch,) = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones((10, 2), np.float32)).batch(10)
    )
    message(
        AttributeError,
        lambda: batch.shape,
        "replicas 0 to 1 have float32[3, 2], replicas 2 to 3 have float32[2, 2]",
    )


def test_copies_are_independent_values(strategy):
    options = rx.RunOptions(donate_args=(0,))
    state = strategy.replicate(jnp.ones(2))
    shallow, deep = copy.copy(state), copy.deepcopy(state)
    strategy.run(lambda s: s + 1, (state,), options=options)
    assert np.asarray(shallow).tolist() == [1.0, 1.0]
    assert np.asarray(deep).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("make", ["values", "replicate"])
def test_after_donation(strategy, values, make):
    value = values if make == "values" else strategy.replicate(jnp.ones(2))
    strategy.run(lambda x: x + 1, (value,), options=rx.RunOptions(donate_args=(0,)))
    assert repr(value) == f"{type(value).__name__}(<donated>)"
    for use in (
        lambda: value.values,
        lambda: value.array,
        lambda: value.dtype,
        lambda: np.asarray(value),
        lambda: strategy.run(lambda x: x, (value,)),
        lambda: strategy.experimental_local_results(value),
    ):
        with pytest.raises(DonatedError, match="Use what `run` returned instead"):
            use()


def test_padding_and_cutting():
    assert largest_shape([(1, 4), (3, 2)]) == (3, 4)
    padded = pad(np.ones((1, 2)), (2, 3))
    assert padded.tolist() == [[1, 1, 0], [0, 0, 0]]
    assert isinstance(padded, np.ndarray)
    assert cut(padded, (1, 2)).tolist() == [[1, 1]]
    array = jnp.ones((2, 2))
    assert cut(array, (2, 2)) is array
    assert pad(array, (2, 2)) is array


def test_components_are_placed_one_per_device():
    topology = Topology.of(jax.devices()[:2])
    value = per_replica_from_components(topology, [np.ones((2, 1)), jnp.zeros((1, 3))])
    assert value.shapes == ((2, 1), (1, 3))
    assert value.array.shape == (2, 2, 3)
    assert [v.tolist() for v in value.values] == [[[1.0], [1.0]], [[0.0, 0.0, 0.0]]]


def test_values_as_arguments_of_a_users_jitted_function(strategy):
    state = strategy.replicate(jnp.arange(3.0))
    assert float(jax.jit(lambda s: jnp.sum(s.array))(state)) == 3.0


def test_results_stay_when_an_unrelated_value_is_donated(strategy, values):
    kept = strategy.run(lambda x: x, (values,))
    strategy.run(lambda x: x + 1, (values,), options=rx.RunOptions(donate_args=(0,)))
    assert [v.tolist() for v in kept.values] == [[0, 1], [10, 11], [20, 21]]

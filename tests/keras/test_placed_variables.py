"""Keras variables are on the devices of the strategy in whose scope they are made, even before its first step."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.lowering import spmd
from replicax._src.tracing import bindings

STRATEGIES = {
    "one_device": (lambda: rx.OneDeviceStrategy("cpu:1"), {1}),
    "mirrored": (lambda: rx.MirroredStrategy(["cpu:0", "cpu:1"]), {0, 1}),
    "central_storage": (lambda: rx.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2"), {2}),
    "central_storage_of_one": (lambda: rx.experimental.CentralStorageStrategy(["cpu:1"]), {1}),
    "tpu": (lambda: rx.TPUStrategy(rx.cluster_resolver.TPUClusterResolver("local")), set(range(8))),
}


@pytest.fixture(params=STRATEGIES)
def placed(request):
    make, devices = STRATEGIES[request.param]
    return make(), devices


def lies_on(array):
    return {device.id for device in array.devices()}


def variables_of_all_kinds():
    model = keras.Sequential(
        [
            keras.Input((3,)),
            keras.layers.Dense(2),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.5),
        ]
    )
    model.compile("adam", "mse", metrics=["mae"])
    late = keras.Sequential([keras.layers.Dense(2)])
    late(np.ones((1, 3)))  # in a stateless scope of Keras
    metric = keras.metrics.Mean()
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    variables = [keras.Variable(1.0), keras.Variable(jnp.ones(2), trainable=False), *metric.variables]
    return [*variables, *model.variables, *model.optimizer.variables, *late.variables, *optimizer.variables]


def test_variables_are_placed_from_their_first_value(placed):
    strategy, devices = placed
    with strategy.scope():
        variables = variables_of_all_kinds()
        ours = rx.Variable(1.0)
    assert lies_on(ours.value) == devices
    assert len(variables) > 20
    assert {v.path: lies_on(v.value) for v in variables} == {v.path: devices for v in variables}
    assert lies_on(keras.Variable(1.0).value) == {0}  # of no scope


def test_after_assignments(placed):
    strategy, devices = placed
    with strategy.scope():
        variable = keras.Variable(np.zeros(2, "float32"))
        count = keras.Variable(1, dtype="int32")
    elsewhere = jax.device_put(jnp.ones(2), jax.devices()[3])
    for value in (np.ones(2), elsewhere, [1.0, 1.0], jnp.ones(2), variable):
        variable.assign(value)
        assert np.asarray(variable.value).tolist() == [1, 1]
        assert lies_on(variable.value) == devices
    variable.assign_add(elsewhere)
    variable.assign_sub(2 * np.ones(2))
    count.assign(3)
    count.assign_add(np.int64(1))
    assert (np.asarray(variable.value).tolist(), int(count.value)) == ([0, 0], 4)
    assert lies_on(variable.value) == lies_on(count.value) == devices


def test_computation_before_the_first_step_runs_on_their_devices(placed):
    strategy, devices = placed
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2, kernel_initializer="ones")])
    assert lies_on(model(np.ones((4, 3)))) == devices
    assert lies_on(model(jnp.ones((4, 3)))) == devices
    first = strategy.experimental_local_results(model.weights[0])
    assert [np.asarray(part).tolist() for part in first] == [[[1, 1]] * 3] * strategy.num_replicas_in_sync
    if len(devices) > 1:
        assert [lies_on(part) for part in first] == [{device} for device in sorted(devices)]


def test_a_metric_takes_the_results_of_each_replica(placed):
    """They are on different devices, and could not be combined with the metric."""
    strategy, devices = placed
    with strategy.scope():
        metric = keras.metrics.Mean()
    results = strategy.run(lambda: jnp.ones(2) * rx.get_replica_context().replica_id_in_sync_group)
    for part in strategy.experimental_local_results(results):
        metric.update_state(part)
    assert float(metric.result()) == (strategy.num_replicas_in_sync - 1) / 2
    assert lies_on(metric.total.value) == devices


def test_layouts_stay():
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=4
    )
    strategy = rx.TPUStrategy(
        resolver, experimental_device_assignment=assignment, layout_map={"kernel": (None, "logical")}
    )
    with strategy.scope():
        layer = keras.layers.Dense(8)
        layer.build((None, 3))
        divided = rx.MirroredStrategy(["cpu:0", "cpu:1"], shard_state="all")
    kernel = layer.kernel
    before = kernel.value.sharding
    assert not kernel.value.is_fully_replicated
    kernel.assign(np.ones((3, 8)))
    kernel.assign_add(np.ones((3, 8)))
    assert kernel.value.sharding == before
    assert np.asarray(kernel.value).tolist() == [[2.0] * 8] * 3
    with divided.scope():
        variable = keras.Variable(np.zeros((4, 2), "float32"))
    before = variable.value.sharding
    variable.assign(np.ones((4, 2)))
    assert variable.value.sharding == before


def test_the_first_step_copies_no_variable_that_only_its_model_holds(monkeypatch):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variables = [keras.Variable(jnp.full((2,), float(i))) for i in range(3)]
    held = variables[2].value
    copies = []
    for module in (bindings, spmd):
        copy = module.own_copy
        monkeypatch.setattr(
            module, "own_copy", lambda *args, copy=copy: copies.append(args[0]) or copy(*args)
        )

    def step():
        for variable in variables:
            variable.assign_add(jnp.ones(2))

    for steps in (1, 2):
        strategy.run(step)
        assert [id(value) for value in copies] == [id(held)], "only the held one, and only once"
        assert [np.asarray(variable.value).tolist() for variable in variables] == [
            [i + steps] * 2 for i in range(3)
        ]
    np.testing.assert_array_equal(held, [2.0, 2.0])


def test_a_first_value_shares_no_memory_with_the_array_that_it_is_made_from():
    array = jnp.arange(4.0)
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(array)
    strategy.run(lambda: variable.assign_add(jnp.ones(4)))
    np.testing.assert_array_equal(array, np.arange(4.0))
    np.testing.assert_array_equal(variable.value, np.arange(4.0) + 1)

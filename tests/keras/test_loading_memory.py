"""Loading a model's weights in a scope holds one variable at a time on the host, and on each device only its shards."""

import gc
import tracemalloc

import jax
import keras
import numpy as np
import pytest

import replicax as rx

CPUS = ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
WIDTH, NUM_LAYERS = 512, 8
VARIABLE_BYTES = 4 * WIDTH * WIDTH
MODEL_BYTES = NUM_LAYERS * VARIABLE_BYTES


def divided_in_replicas():
    resolver = rx.cluster_resolver.TPUClusterResolver("local")
    topology = rx.tpu.experimental.initialize_tpu_system(resolver)
    assignment = rx.tpu.experimental.DeviceAssignment.build(
        topology, computation_shape=[1, 1, 1, 2], num_replicas=2
    )
    return rx.TPUStrategy(resolver, assignment, layout_map={"kernel": (None, "logical")})


# Each strategy, and the part of a variable that a device holds.
STRATEGIES = {
    "mirrored": (lambda: rx.MirroredStrategy(CPUS), 1),
    "sharded_state": (lambda: rx.MirroredStrategy(CPUS, shard_state="all"), 1 / 4),
    "layout_map": (divided_in_replicas, 1 / 2),
}


def made():
    layers = [keras.layers.Dense(WIDTH, use_bias=False) for _ in range(NUM_LAYERS)]
    return keras.Sequential([keras.Input((WIDTH,)), *layers])


@pytest.fixture
def largest(monkeypatch):
    """The largest block of host memory, and the largest part of an array on a device, that existed after any
    assignment, in bytes.
    """
    gc.collect()
    found, before = {"host": 0, "device": 0}, {id(array): array for array in jax.live_arrays()}
    assign = keras.Variable.assign

    def observed(self, value):
        result = assign(self, value)
        blocks = [trace.size for trace in tracemalloc.take_snapshot().traces]
        arrays = [array for array in jax.live_arrays() if id(array) not in before]
        parts = [shard.data.nbytes for array in arrays for shard in array.addressable_shards]
        found.update(host=max(found["host"], *blocks), device=max(found["device"], *parts))
        return result

    monkeypatch.setattr(keras.Variable, "assign", observed)
    tracemalloc.start()
    yield found
    tracemalloc.stop()


@pytest.mark.filterwarnings("ignore:__array__ implementation")  # Keras saves so
@pytest.mark.parametrize(
    ("strategy", "file"),
    [
        ("mirrored", "model.weights.h5"),
        pytest.param("mirrored", "model.keras", marks=pytest.mark.rest),
        pytest.param("sharded_state", "model.weights.h5", marks=pytest.mark.rest),
        ("sharded_state", "model.keras"),
        ("layout_map", "model.weights.h5"),
        pytest.param("layout_map", "model.keras", marks=pytest.mark.rest),
    ],
)
def test_one_variable_at_a_time(strategy, file, tmp_path, largest):
    path = tmp_path / file
    saved = made()
    saved.save(path) if file.endswith(".keras") else saved.save_weights(path)
    expected = [np.array(v.value) for v in saved.variables]
    del saved
    gc.collect()
    largest.update(host=0, device=0)
    make_strategy, part = STRATEGIES[strategy]
    with make_strategy().scope():
        model = made() if file.endswith(".h5") else None
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        model = keras.models.load_model(path) if model is None else model.load_weights(path) or model
        host_peak = tracemalloc.get_traced_memory()[1] - before
    for variable, value in zip(model.variables, expected, strict=True):
        np.testing.assert_array_equal(variable.value, value)
        assert {s.data.nbytes for s in variable.value.addressable_shards} == {VARIABLE_BYTES * part}
    assert largest["device"] == VARIABLE_BYTES * part
    assert largest["host"] < 1.1 * VARIABLE_BYTES, "Keras would read all of a .keras file"
    # The first CPU device may take over the host's array, so one model may be the device's.
    assert host_peak < MODEL_BYTES + 4 * VARIABLE_BYTES

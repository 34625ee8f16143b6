"""When GPUs and TPUs gather the sharded parameters of unrolled models, by the programs of their compilers."""

import re

import jax
import jax.numpy as jnp
import keras
import pytest
from jax.experimental.compilation_cache import compilation_cache

import replicax as rx
from replicax._plan import planning
from replicax._src.strategies import lower_method
from replicax._src.tracing import gathers
from replicax._src.values.distributed import PerReplica

FEW, MANY = 4, 16


@pytest.fixture(autouse=True)
def without_cache():
    """JAX cannot read a program for devices that are not here from its cache (jax 0.10)."""
    directory = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_compilation_cache_dir", directory)
    compilation_cache.reset_cache()


def planned(topology, num_layers, way, width):
    """The plan of a step of a chain of layers, by ``fit`` or by ``run``."""
    strategy = rx.MirroredStrategy(["cpu:0"], shard_state="all")
    with strategy.scope():
        dense = [keras.layers.Dense(width, "relu", use_bias=False) for _ in range(num_layers)]
        model = keras.Sequential([keras.Input((width,)), *dense])
        model.compile(keras.optimizers.SGD(0.1), "mse")
        model.optimizer.build(model.trainable_variables)
    rows = jax.ShapeDtypeStruct((64, width), jnp.float32)
    if way == "fit":
        return strategy.plan(model.fit, (rows, rows), {"batch_size": 64}, topology=topology)

    def step(inputs):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((model(inputs) ** 2).mean(-1))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return strategy.plan(step, (rows,), topology=topology)


class UnevenRows(PerReplica):
    """A batch in which all replicas but the first have one row less."""

    __slots__ = ()

    def __init__(self, array, num_replicas):
        rows, *others = array.shape[1:]
        super().__init__(array, num_replicas, tuple((rows - (r > 0), *others) for r in range(num_replicas)))


@pytest.mark.parametrize(("topology", "width", "share"), [("v5e:2x4", 2048, 0.1), ("h100:1x8", 4096, 0.8)])
def test_memory_hardly_grows_with_layers_with_uneven_batches(topology, width, share, monkeypatch):
    """On TPUs. GPUs compute some gradients before they sum the first, yet need half of the memory that they would need
    with all gathers first."""
    monkeypatch.setattr(lower_method, "PerReplica", UnevenRows)
    few, many = (planned(topology, count, "run", width) for count in (FEW, MANY))
    of_layers = (MANY - FEW) * width * width * 4
    grown_by = many.memory.peak - few.memory.peak - of_layers // 8
    assert sum(c.count for c in many.compiled if c.kind == "all-gather") == 2 * MANY - 1
    assert grown_by < share * of_layers


@pytest.mark.parametrize("way", ["fit", "run"])
@pytest.mark.parametrize(
    ("topology", "width", "share"),
    [("v5e:2x4", 2048, 0.1), ("h100:1x8", 4096, 0.35)],  # GPUs sum three gradients of this size together
)
def test_memory_hardly_grows_with_layers(topology, width, share, way, monkeypatch):
    of_layers = (MANY - FEW) * width * width * 4

    def grown():
        few, many = planned(topology, FEW, way, width), planned(topology, MANY, way, width)
        of_state = of_layers // 8
        return many.memory.peak - few.memory.peak - of_state, many

    grown_by, plan = grown()
    assert (
        sum(c.count for c in plan.compiled if c.kind == "all-gather") >= 2 * MANY - 2
    )  # forward and backward, but for the first layer
    assert grown_by < share * of_layers
    if topology == "h100:1x8" and way == "fit":
        monkeypatch.setattr(gathers, "LEAST_GATHERED_BYTES", 1 << 60)
        assert grown()[0] > 0.8 * of_layers


def test_gathers_lie_between_multiplications(monkeypatch):
    texts = []
    read = planning.read_hlo
    monkeypatch.setattr(planning, "read_hlo", lambda text, *others: texts.append(text) or read(text, *others))
    planned("h100:1x8", MANY, "fit", 2048)
    entry = texts[0][texts[0].index("\nENTRY") :]  # in the order of the schedule
    found = re.findall(r"(all-gather-start)\(|custom_call_target=\"(__cublas\S*)\"|(__triton\S*gemm)", entry)
    letters = "".join("G" if gather else "m" for gather, *_ in found)
    assert letters.count("G") == 2 * MANY - 1  # forward and backward, but for the first layer
    assert letters.count("m") >= 3 * MANY - 1
    assert "GGGG" not in letters, letters


class Stacked(keras.layers.Layer):
    """Scanned layers with a stack of kernels."""

    def __init__(self, num_layers, width):
        super().__init__()
        self._stack = num_layers, width, width

    def build(self, shape):
        self.kernels = self.add_weight(shape=self._stack)

    def call(self, rows):
        layer = jax.checkpoint(lambda h, kernel: (h + jnp.tanh(h @ kernel), None))
        return jax.lax.scan(layer, rows, self.kernels.value)[0]


def test_gradients_of_scanned_layers_are_never_stacked_in_full():
    width = 2048

    def peak(num_layers):
        strategy = rx.MirroredStrategy(["cpu:0"], shard_state="all")
        with strategy.scope():
            model = keras.Sequential([keras.Input((width,)), Stacked(num_layers, width)])
            model.compile(keras.optimizers.SGD(0.1), "mse")
        rows = jax.ShapeDtypeStruct((64, width), jnp.float32)
        plan = strategy.plan(model.fit, (rows, rows), {"batch_size": 64}, topology="h100:1x8")
        return plan.memory.peak

    of_layers = (MANY - FEW) * width * width * 4
    assert peak(MANY) - peak(FEW) < 0.4 * of_layers  # the state, and the gradients, in eighths

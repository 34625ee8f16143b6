"""Plans for TPUs and GPUs, from 1 device to 4,096. Nothing ran on any device: the tests check the compilers' reports."""

import re
import resource

import jax
import jax.numpy as jnp
import pytest

import replicax as rx
from replicax import errors
from replicax._src.devices.ahead_of_time import topology_ahead
from replicax._src.devices.hardware import GPU_VARIABLE, chips, hardware_of
from replicax._src.jax_internals import jax_compat

ROWS, IN, HIDDEN = 256, 512, 1024
F32 = 4
STATE = IN * HIDDEN * F32
GIB = 1 << 30
TPU_SLICES = [f"{chip.key}:{shape}" for chip in chips().values() for shape in chip.topologies]


def describe(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def sgd(params, x):
    gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(params)
    return params - 0.1 * rx.get_replica_context().all_reduce("sum", gradient)


def plan(topology, fn=sgd, rows=ROWS, shape=(IN, HIDDEN)):
    strategy = rx.MirroredStrategy(["cpu:0"])
    params = strategy.replicate(describe(*shape))
    options = rx.RunOptions(donate_args=(0,))
    return strategy.plan(fn, (params, describe(rows, shape[0])), options=options, topology=topology)


@pytest.mark.parametrize("topology", ["v5e:2x4", "h100:1x8"])
def test_lower_gives_the_program_of_the_plan(topology):
    found = plan(topology)
    strategy = rx.MirroredStrategy(["cpu:0"])
    arguments = strategy.replicate(describe(IN, HIDDEN)), describe(ROWS, IN)
    lowered = strategy.lower(sgd, arguments, options=rx.RunOptions(donate_args=(0,)), topology=topology)
    with jax_compat.not_in_persistent_cache():  # JAX would warn that it cannot load it again
        compiled = lowered.compile()
    analysis = compiled.memory_analysis()
    assert (analysis.argument_size_in_bytes, analysis.temp_size_in_bytes, analysis.alias_size_in_bytes) == (
        found.memory.arguments,
        found.memory.temporaries,
        found.memory.donated,
    )
    assert len(re.findall(r" all-reduce(?:-start)?\(", compiled.as_text() or "")) == 1


def test_a_second_plan_compiles_again_though_there_is_a_persistent_cache():
    """There is one in all tests. JAX cannot load programs compiled for GPUs that are not here, and would warn."""
    assert jax.config.jax_compilation_cache_dir
    first, second = plan("h100:1x8"), plan("h100:1x8")
    assert first.memory == second.memory


@pytest.mark.parametrize(
    "topology",
    [
        "v5e:1x1",
        "v5e:2x4",
        "v6e:16x16",
        "v5p:16x16x16",
        "h100:1x1",
        "h100:1x8",
        "a100:2x4",
        "h200:4x8",
        "b200:512x8",
        "v4:2x2x4",
        "tpu7x:2x2x1",
    ],
)
def test_a_step_of_data_parallel_training(topology):
    found = plan(topology)
    num_devices = hardware_of(topology).num_devices
    assert found.fits
    assert found.num_replicas == num_devices
    assert found.global_batch == ROWS * num_devices
    assert found.flops == {"float32": 2 * 2 * ROWS * IN * HIDDEN}
    assert found.memory.arguments == STATE + ROWS * IN * F32
    assert found.memory.donated == STATE
    exchanged = [("all-reduce", STATE, num_devices, 1)] if num_devices > 1 else []
    for collectives in (found.requested, found.compiled):
        assert [(one.kind, one.bytes, one.group_size, one.count) for one in collectives] == exchanged


@pytest.mark.parametrize("topology", TPU_SLICES)
def test_all_slices_that_are_sold_are_known_to_the_compiler(topology):
    hardware = hardware_of(topology)
    assert len(topology_ahead(hardware).devices) == hardware.num_devices


@pytest.mark.parametrize(("num_slices", "slice_"), [(2, "v5e:4x4"), (4, "v6e:2x4")])
def test_slices_exchange_the_sums_of_each_device_over_the_network(num_slices, slice_):
    found = plan(f"{num_slices}x{slice_}")
    size = hardware_of(slice_).num_devices
    assert found.num_replicas == num_slices * size
    (requested,) = found.requested
    assert (requested.group_size, requested.num_domains) == (num_slices * size, num_slices)
    (between,) = [one for one in found.compiled if one.num_domains > 1]
    assert (between.kind, between.group_size) == ("all-reduce", num_slices)
    assert STATE // size <= between.bytes <= 2 * STATE // size  # tiles are padded
    inside = {one.stands_for or one.kind: one for one in found.compiled if one.num_domains == 1}
    assert {kind: (one.bytes, one.group_size) for kind, one in inside.items()} == {
        "reduce-scatter": (STATE, size),
        "all-gather": (STATE, size),
    }
    network = {bound.name: bound for bound in found.bounds}["network"]
    assert network.amount == pytest.approx(2 * (num_slices - 1) / num_slices * STATE / size)
    assert f"on {num_slices} slices" in str(found)


def test_all_gather_that_became_an_all_reduce_is_explained():
    def step(_, x):
        whole = jax.lax.all_gather(x, "replica", axis=0, tiled=True)
        return jnp.tanh(whole @ whole.T)

    thin = plan("v5e:8x8", step, rows=2)
    (one,) = thin.compiled
    assert (one.kind, one.stands_for, thin.requested[0].kind) == ("all-reduce", "all-gather", "all-gather")
    assert one.wire_bytes == 2 * thin.requested[0].wire_bytes
    assert "each device adds its piece to zeros" in str(thin)
    thick = plan("v5e:2x4", step, rows=ROWS)
    assert [(one.kind, one.stands_for) for one in thick.compiled] == [("all-gather", None)]


@pytest.mark.parametrize("gpu", [chip.key for chip in chips().values() if chip.kind == "gpu"])
def test_compiler_accepts_every_target(gpu):
    """Convolutions and products too, forward and backward: their generated code depends on the target."""

    def step(kernels, x):
        def loss(kernels):
            dims = ("NHWC", "HWIO", "NHWC")
            h = jax.lax.conv_general_dilated(
                x.reshape(-1, 8, 8, 8), kernels, (1, 1), "SAME", dimension_numbers=dims
            )
            return jnp.sum(jax.nn.softmax(h.reshape(x.shape) @ h.reshape(x.shape).T) ** 2)

        return kernels - rx.get_replica_context().all_reduce("sum", jax.grad(loss)(kernels))

    strategy = rx.MirroredStrategy(["cpu:0"])
    found = strategy.plan(
        step, (strategy.replicate(describe(3, 3, 8, 8)), describe(64, 512)), topology=f"{gpu}:2x8"
    )
    assert found.fits
    assert [one.kind for one in found.compiled] == ["all-reduce"]
    assert found.hardware.chip.key == gpu


@pytest.mark.parametrize(("topology", "has_cycles"), [("v5p:2x2x1", True), ("h100:1x4", False)])
def test_collectives_in_loops_count_as_often_as_they_run(topology, has_cycles):
    def step(w, x):
        def body(w, _):
            gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w) ** 2))(w)
            return w - 0.1 * rx.get_replica_context().all_reduce("sum", gradient), None

        return jax.lax.scan(body, w, length=7)[0]

    found = plan(topology, step)
    assert [(one.bytes, one.count) for one in found.requested] == [(STATE, 7)]
    assert [(one.bytes, one.count) for one in found.compiled] == [(STATE, 7)]
    once = plan(topology)
    assert found.flops["float32"] == 7 * once.flops["float32"]
    assert bool(found.estimated_cycles) == has_cycles
    if has_cycles:
        assert 3 < found.estimated_cycles / once.estimated_cycles < 12


def test_the_roofline_and_its_parts():
    found = plan("h100:16x8")
    chip = found.hardware.chip
    parts = {bound.name: bound for bound in found.bounds}
    assert parts["multiplications"].seconds == found.flops["float32"] / chip.flops_of("float32")
    assert parts["links"].seconds == pytest.approx(2 * 7 / 8 * STATE / chip.link_bytes_per_s)
    # Each of the 8 GPUs of a host exchanges its sums of an eighth with 15 other hosts.
    assert parts["network"].seconds == pytest.approx(2 * 15 / 16 * STATE / 8 / chip.network_bytes_per_s)
    assert found.at_least_s == max(bound.seconds for bound in found.bounds)
    assert all(bound.source.startswith("https://") for bound in found.bounds)
    assert "network" not in {bound.name for bound in plan("v5p:4x4x4").bounds}


@pytest.mark.parametrize("topology", ["v5e:2x4", "a100:1x8"])
def test_size_of_the_excess_and_remedies(topology):
    limit = hardware_of(topology).chip.memory_bytes
    rows = 2 * limit // (64 * F32)  # the rows alone are twice the memory
    found = plan(topology, rows=rows, shape=(64, 64))
    assert not found.fits
    assert found.memory.peak > 2 * 0.9 * limit
    fewer, more = (remedy for remedy in found.remedies if remedy.fits)
    assert max(fewer.peak, more.peak) < limit
    assert fewer.topology == topology
    assert hardware_of(more.topology).num_devices * more.rows == more.global_batch == found.global_batch
    assert "too much" in str(found)


def test_variables_alone_exceed_the_memory():
    found = plan("v5e:2x2", shape=(1 << 17, 1 << 16), rows=8)  # 32 GiB
    assert not found.fits
    assert found.memory.limit < 16 * GIB
    assert not found.memory.is_exact
    assert found.memory.peak >= 32 * GIB


@pytest.mark.parametrize("topology", ["v5p:16x16x16", "h100:512x8"])
def test_seventy_billion_parameters_take_no_memory_here(topology):
    def step(weights, rows):
        def loss(weights):
            def layer(h, w):
                return h + jnp.tanh(h @ w[0]) @ w[1], None

            return jnp.sum(jax.lax.scan(jax.checkpoint(layer), rows, weights)[0] ** 2)

        gradients = rx.get_replica_context().all_reduce("sum", jax.grad(loss)(weights))
        return jax.tree_util.tree_map(lambda w, g: w - 1e-4 * g, weights, gradients)

    strategy = rx.MirroredStrategy(["cpu:0"])
    shapes = (80, 8192, 53248), (80, 53248, 8192)
    weights = strategy.replicate(tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
    rows = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
    found = strategy.plan(step, (weights, rows), options=rx.RunOptions(donate_args=(0,)), topology=topology)
    num_weights = 2 * 80 * 8192 * 53248
    assert found.state_bytes == 2 * num_weights
    products = 2 + 1 + 4  # of a layer's two: forward, the first of them again, and for each two backward
    assert found.flops == {"bfloat16": products * 2 * 4096 * num_weights / 2}
    assert not found.fits
    assert "no batch is small enough" in str(found)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    assert used < 8 * GIB


def test_process_not_started_for_gpus_raises(monkeypatch):
    monkeypatch.delenv(GPU_VARIABLE)
    with pytest.raises(errors.PlanError, match=f"{GPU_VARIABLE}=1"):
        plan("h100:3x8")

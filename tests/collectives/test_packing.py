"""Which arrays of a sum share one buffer, and that each comes out of it again."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import replicax as rx
from replicax._src.collectives.in_replica import Packing, packed_sum

DEVICES = ["cpu:0", "cpu:1", "cpu:2"]
KIB, MIB = 2**10, 2**20
ONE_PROCESS = SimpleNamespace(
    is_cpu=True, peers=None, survivors=None, bytes_per_pack=0, num_logical_devices=1
)
SEVERAL_PROCESSES = SimpleNamespace(
    is_cpu=True, peers=object(), survivors=None, bytes_per_pack=0, num_logical_devices=1
)
GPUS = SimpleNamespace(is_cpu=False, peers=object(), survivors=None, bytes_per_pack=0, num_logical_devices=1)
LOGICAL_DEVICES = SimpleNamespace(
    is_cpu=True, peers=None, survivors=None, bytes_per_pack=1024, num_logical_devices=2
)


def summed(values, packing):
    """``packed_sum`` of arrays [R, ...] with row r on replica r, compiled over the devices of a strategy."""
    mesh = rx.MirroredStrategy(DEVICES).topology.mesh
    return jax.jit(
        jax.shard_map(
            lambda rows: packed_sum([row[0] for row in rows], packing),
            mesh=mesh,
            in_specs=PartitionSpec("replica"),
            out_specs=PartitionSpec(),
            check_vma=False,
        )
    ).trace(values)


def buffers(sizes, packing):
    """The bytes that are reduced at once, for float32 arrays of these sizes."""
    rows = [jax.ShapeDtypeStruct((3, size // 4), jnp.float32) for size in sizes]
    (call,) = summed(rows, packing).jaxpr.eqns
    reduced = [
        v.aval for e in call.params["jaxpr"].eqns if e.primitive.name.startswith("psum") for v in e.invars
    ]
    return [4 * aval.size for aval in reduced]


@pytest.mark.parametrize(
    "packing",
    [
        None,
        Packing(1),
        Packing(20),
        Packing(4 * KIB),
        Packing(MIB, 40),
        Packing.on(ONE_PROCESS),
        Packing.on(SEVERAL_PROCESSES),
    ],
    ids=str,
)
def test_every_sum_is_that_of_its_array(packing):
    rng = np.random.default_rng(0)
    shapes = [(), (3,), (2, 5), (0,), (1001, 7), (1,), (4, 0, 2), (70_001,)]
    dtypes = [np.float32, np.int32, jnp.bfloat16, np.float16, np.uint8]
    rows = [
        np.asarray(rng.integers(0, 40, (3, *shape)), dtype)
        for number, shape in enumerate(shapes)
        for dtype in dtypes[: 2 + number % 4]
    ]
    results = summed(rows, packing).lower().compile()(rows)
    for row, result in zip(rows, results, strict=True):
        assert (result.shape, result.dtype) == (row.shape[1:], row.dtype)
        np.testing.assert_array_equal(np.asarray(result, np.float64), row.astype(np.float64).sum(axis=0))


@pytest.mark.parametrize(
    ("topology", "sizes", "expected"),
    [
        (ONE_PROCESS, [KIB, 8, 4 * KIB], [5 * KIB + 8]),
        (ONE_PROCESS, [KIB, 256 * KIB, KIB, 64 * MIB], [2 * KIB, 256 * KIB, 64 * MIB]),
        (SEVERAL_PROCESSES, [KIB, 256 * KIB, KIB, MIB], [MIB + 258 * KIB]),
        (SEVERAL_PROCESSES, [MIB] * 6, [4 * MIB, 2 * MIB]),
        (SEVERAL_PROCESSES, [MIB, 2 * MIB, MIB, 64 * MIB], [2 * MIB, 2 * MIB, 64 * MIB]),
        (SEVERAL_PROCESSES, [64 * MIB], [64 * MIB]),
        (GPUS, [KIB, 2 * KIB], [KIB, 2 * KIB]),
        (LOGICAL_DEVICES, [KIB // 2, KIB // 4], [KIB // 2, KIB // 4]),
    ],
)
def test_packing_fits_the_devices(topology, sizes, expected):
    assert sorted(buffers(sizes, Packing.on(topology))) == sorted(expected)


@pytest.mark.parametrize("topology", [ONE_PROCESS, SEVERAL_PROCESSES, GPUS])
@pytest.mark.parametrize(
    ("bytes_per_pack", "expected"),
    [
        (16, [16, 12, 400 * KIB, 3 * MIB]),
        (500 * KIB, [400 * KIB + 28, 3 * MIB]),
        (4 * MIB, [3 * MIB + 400 * KIB + 28]),
    ],
)
def test_buffers_have_at_most_the_bytes_that_the_options_say(topology, bytes_per_pack, expected):
    packing = Packing.on(topology, rx.CommunicationOptions(bytes_per_pack=bytes_per_pack))
    assert sorted(buffers([8, 8, 12, 400 * KIB, 3 * MIB], packing)) == sorted(expected)


def test_options_of_one_call_take_precedence_over_those_of_the_strategy():
    topology = SimpleNamespace(**vars(ONE_PROCESS) | {"bytes_per_pack": 16})
    assert buffers([8, 8, 12], Packing.on(topology)) == [16, 12]
    assert buffers([8, 8, 12], Packing.on(topology, rx.CommunicationOptions(bytes_per_pack=28))) == [28]


def test_each_dtype_has_its_own_buffer():
    rows = [jnp.ones((3, 5), dtype) for dtype in (jnp.float32, jnp.int32, jnp.float32, jnp.int32)]
    text = summed(rows, Packing.on(SEVERAL_PROCESSES)).lower().as_text()
    assert text.count("stablehlo.all_reduce") == 2
    assert "tensor<10xf32>) -> tensor<10xf32>" in text
    assert "tensor<10xi32>) -> tensor<10xi32>" in text


def num_kernels(values, packing):
    """The number of different kernels that XLA compiles for the sums of arrays [R, ...], each followed by an update."""

    def updates(rows):
        sums = packed_sum([row[0] for row in rows], packing)
        return [jnp.sqrt(1 + total * total) for total in sums]

    placed = jax.shard_map(
        updates,
        mesh=rx.MirroredStrategy(DEVICES).topology.mesh,
        in_specs=PartitionSpec("replica"),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return len(kernels(jax.jit(placed).lower(values).compile().as_text()))


def kernels(text):
    """The fused computations of a compiled program that differ in more than names."""
    bodies = re.findall(r"^%fused_computation\S* .*?^}", text, re.MULTILINE | re.DOTALL)
    return {re.sub(r"%[\w.-]+|param_[\d.]+|, metadata={[^}]*}|/\*.*?\*/", "", body) for body in bodies}


@pytest.mark.parametrize(
    "packing", [Packing.on(ONE_PROCESS), Packing.on(SEVERAL_PROCESSES), Packing(4 * MIB, None, True)]
)
def test_arrays_of_one_shape_share_their_kernels_however_many_there_are(packing):
    some, more = (
        num_kernels([jax.ShapeDtypeStruct((3, 8, 8), jnp.float32)] * count, packing) for count in (20, 40)
    )
    assert 0 < more <= some


def test_a_buffer_of_many_arrays_is_cut_where_they_begin():
    rng = np.random.default_rng(0)
    for dtype in (np.float32, np.int32, np.complex64):
        rows = [rng.integers(0, 9, (3, size % 5, 2)).astype(dtype) for size in range(40)]
        for row, result in zip(
            rows, summed(rows, Packing.on(ONE_PROCESS)).lower().compile()(rows), strict=True
        ):
            np.testing.assert_array_equal(result, row.sum(axis=0))

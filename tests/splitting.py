"""Runs a program over a global batch like replicas that each have some of the rows."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from local_processes import combined, one_device
from replicax._src.jax_internals import jax_compat
from replicax._src.lowering.round_programs import ReplicaOperand, RoundPrograms
from replicax._src.tracing.flat import FlatProgram
from replicax._src.tracing.row_partitioner.row_layouts import Rows, RowSplit, Shared
from replicax._src.tracing.row_partitioner.row_plan import RowsPlan


def plan_of(function, whole, batch, sizes, replica=None):
    """The plan of ``function(whole, batch)``, and its operands in order."""
    flat, tree = jax.tree_util.tree_flatten((whole, batch))
    closed = jax.make_jaxpr(lambda *args: function(*tree.unflatten(args)))(*flat)
    num_rows = len(jax.tree_util.tree_leaves(batch))
    layouts = [Shared.WHOLE] * (len(flat) - num_rows) + [Rows(0)] * num_rows
    return RowsPlan(FlatProgram(closed.jaxpr, closed.consts), layouts, RowSplit(sizes, replica)), flat


def garbage(dtype):
    if np.issubdtype(dtype, np.bool_):
        return True
    return np.iinfo(dtype).max if np.issubdtype(dtype, np.integer) else np.nan


def held(array, sizes):
    """The parts of an array that replicas hold, one after the other: equally many rows each, with garbage as padding."""
    array = np.asarray(array)
    parts = np.split(array, np.cumsum(sizes)[:-1])
    padded = np.full((len(sizes), max(sizes), *array.shape[1:]), garbage(array.dtype), array.dtype)
    for rows, part in zip(padded, parts):
        rows[: len(part)] = part
    return padded.reshape(-1, *array.shape[1:])


def run_by_rows(function, whole, batch, sizes):
    """The results of the split program on replica 0; the test checks that all replicas have the same. Also returns the
    number of sums."""
    plan, flat = plan_of(function, whole, batch, sizes)
    num_whole = len(jax.tree_util.tree_leaves(whole))
    mesh = Mesh(np.array(jax.devices()[: len(sizes)]), ("replica",))
    sums = []

    def summed(values):
        sums.append(len(values))
        return [jax.lax.psum(value, "replica") for value in values]

    split = jax_compat.shard_map(
        lambda *args: [jnp.asarray(result)[None] for result in plan.evaluate(args, summed)],
        mesh=mesh,
        in_specs=(PartitionSpec(),) * num_whole + (PartitionSpec("replica"),) * (len(flat) - num_whole),
        out_specs=PartitionSpec("replica"),
        check_vma=False,
    )
    args = [value if i < num_whole else held(value, sizes) for i, value in enumerate(flat)]
    results = [np.asarray(result) for result in jax.jit(split)(*args)]
    for result in results:
        np.testing.assert_array_equal(result, np.broadcast_to(result[0], result.shape))
    return [result[0] for result in results], [count for count in sums if count]


def run_in_segments(function, whole, batch, sizes):
    """The results of the split program as programs of one device, with the sums added in NumPy between them."""
    replica, num_whole = ReplicaOperand(), len(jax.tree_util.tree_leaves(whole))
    plan, flat = plan_of(function, whole, batch, sizes, replica)
    parts = [held(array, sizes).reshape(len(sizes), -1, *np.shape(array)[1:]) for array in flat[num_whole:]]
    operands = [[*map(np.asarray, flat[:num_whole]), *rows] for rows in zip(*parts, strict=True)]
    programs = RoundPrograms(
        plan.in_rounds(),
        operands[0],
        "split program",
        one_device(),
        len(sizes),
        replica,
        donated=(),
        donates=False,
        finish=list,
    )
    slots = list(map(programs.slots, operands))
    last = programs.slots(operands[0][:num_whole])
    sums = programs.run_rounds(
        range(len(sizes)), slots, lambda number, parts: combined(programs.rounds[number], parts)
    )
    compiled, args = programs.finishing(last, sums)  # it has the sums, and no rows
    return compiled(*args)

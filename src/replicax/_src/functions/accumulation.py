"""``rx.experimental.accumulate``: gradients of one large batch, computed from micro-batches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from replicax._src.collectives.in_replica import IndexedSlices
from replicax._src.functions.control import assert_same
from replicax._src.functions.function import Function
from replicax._src.jax_internals import jax_compat
from replicax._src.scope import context
from replicax._src.tracing.capture import TracedCapture, current_capture
from replicax._src.tracing.key import is_array, name_of
from replicax._src.tracing.loss_counts import LossCount, counting, note_loss
from replicax._src.values.distributed import DistributedValues, PerReplica
from replicax._src.values.framework import is_variable
from replicax._src.vocabulary.errors import InvalidArgumentError, PerReplicaUseError, StructureError
from replicax._src.vocabulary.options import whole_number

MicroFunction = Callable[..., tuple[Any, Any]]
Groups = Sequence[tuple[int, int]]
"""(number of micro-batches, rows of each), for each size."""


def accumulate(num_micro_batches: int) -> Callable[[MicroFunction], Callable[..., Any]]:
    """A decorator that calls a function once for each micro-batch and returns this replica's share of the mean.

    The function takes a batch and returns ``(sums, count)``. With B_r,i micro-batch i of replica r, the result on
    replica r is  Σ_i sums(B_r,i) / Σ_r Σ_i count(B_r,i).  The shares of all replicas add up to the mean over the
    global batch: exactly so for masks, micro-batches of different sizes and unequal counts. An optimizer's ``apply``
    sums gradients over replicas, so they are exchanged once. The counts are exchanged once, too.

    The micro-batches run in ``lax.scan``, so only one of them needs memory for activations. Their sizes differ by at
    most one row, larger ones first. A batch of fewer rows than ``num_micro_batches`` has one micro-batch for each row.
    Variables that the function assigns (metrics, seeds, moving statistics) pass from one micro-batch to the next.

    Call the decorated function in replica context, on every replica. Elsewhere there is one replica.

    Args:
      num_micro_batches: The number of micro-batches n of each replica, at least 1.

    Returns:
      A decorator. The function that it returns takes a pytree of arrays [rows, ...] of this replica, then arguments
      that every micro-batch gets unchanged. It returns a pytree like ``sums``; zeros if the count of all replicas is 0.
      Integers become floating. Half-precision sums are accumulated in float32.

    Raises:
      InvalidArgumentError: n is not a positive int, or the leaves of the batch have different numbers of rows.
      StructureError: The function does not return a pair of sums and one number, or the shape of a sum depends on the
        number of rows.

    >>> import jax.numpy as jnp, replicax as rx
    >>> @rx.experimental.accumulate(2)
    ... def mean_of(batch):
    ...     values, mask = batch
    ...     return jnp.sum(values * mask), jnp.sum(mask)
    >>> float(mean_of((jnp.arange(5.0), jnp.array([1, 1, 1, 1, 0]))))
    1.5
    """
    num_micro_batches = whole_number("num_micro_batches", num_micro_batches, least=1)

    def decorate(fn: MicroFunction) -> Callable[..., Any]:
        @functools.wraps(fn)
        def share(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return _share(lambda rows: fn(rows, *args, **kwargs), batch, num_micro_batches, name_of(fn))

        compiled = Function(share)

        @functools.wraps(fn)
        def accumulated(batch: Any, *args: Any, **kwargs: Any) -> Any:
            return (compiled if current_capture() is None else share)(batch, *args, **kwargs)

        return accumulated

    return decorate


def micro_batch_sizes(num_rows: int, num_micro_batches: int) -> Groups:
    """Returns one size of micro-batches, or two that differ by one row, the larger first."""
    number = min(num_rows, num_micro_batches)
    if not number:
        return []
    rows, num_larger = divmod(num_rows, number)
    groups = [(num_larger, rows + 1), (number - num_larger, rows)]
    return [group for group in groups if group[0]]


def _share(micro: MicroFunction, batch: Any, num_micro_batches: int, name: str) -> Any:
    leaves, tree = jax.tree_util.tree_flatten(batch, is_leaf=_is_distributed)
    arrays, num_rows = _rows_of(leaves, name)

    def flat(rows: Sequence[Any]) -> _Sums:
        return _sums_of(micro(tree.unflatten(rows)), name)

    capture = current_capture()
    add = functools.partial(_scanned, capture) if isinstance(capture, TracedCapture) else _looped
    sums = add(flat, arrays, micro_batch_sizes(num_rows, num_micro_batches), name)
    count = sums.arrays[-1]
    replica = context.get_replica_context()
    if replica is not None and replica.communicator is not None:
        # Dividing by a reduced number must not make a gradient that all replicas share look like a reduced one.
        count = assert_same(replica.communicator.sum([count])[0])
    note_loss(LossCount(lambda: count))
    shares = [_divided(total, count, dtype) for total, dtype in zip(sums.arrays, sums.dtypes, strict=True)]
    return sums.tree.unflatten(shares[:-1])


@dataclass(frozen=True)
class _Sums:
    """What a function returns, or the totals.

    Attributes:
      tree: The structure of the sums.
      arrays: The leaves of the sums, then the count.
      dtypes: Their dtypes in the function.
    """

    tree: Any
    arrays: list[Any]
    dtypes: list[Any]

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        return [tuple(array.shape) for array in self.arrays]

    def check_alike(self, other: _Sums, name: str) -> None:
        """Raises if two micro-batches have sums of different structures or shapes."""
        if self.tree != other.tree or self.shapes != other.shapes:
            raise StructureError(
                f"The sums that {name} returns depend on the number of rows of a micro-batch: it returned {self.tree} of "
                f"the shapes {self.shapes[:-1]}, and then {other.tree} of the shapes {other.shapes[:-1]}. Sum over the "
                "rows: return jnp.sum(losses), not the losses."
            )


def _sums_of(result: Any, name: str) -> _Sums:
    if not isinstance(result, tuple) or len(result) != 2:
        got = f"a tuple of {len(result)}" if isinstance(result, tuple) else type(result).__name__
        raise StructureError(
            f"A function for accumulate returns (sums, count), got {got} from {name}. Write `return (loss, "
            "gradients), count`, with the sums over the rows of the micro-batch and the number that they are to be divided "
            "by, such as jnp.sum(mask)."
        )
    sums, count = result
    leaves, tree = jax.tree_util.tree_flatten(sums, is_leaf=_is_leaf_of_sums)
    for leaf in leaves:
        is_key = jax_compat.is_typed_key(getattr(leaf, "dtype", None))
        if is_key or isinstance(leaf, IndexedSlices) or not (is_variable(leaf) or is_number(leaf)):
            raise StructureError(
                f"A sum that {name} returns is {leaf!r}, and sums are arrays or numbers. Use .to_dense() for IndexedSlices."
            )
    if not is_number(count) or jnp.shape(count) != ():
        raise StructureError(
            f"The count that {name} returns is {count!r}, and it must be one number: the sum of the mask or weights, or "
            "the number of rows, x.shape[0]."
        )
    arrays = [jnp.asarray(leaf.value if is_variable(leaf) else leaf) for leaf in (*leaves, count)]
    return _Sums(tree, arrays, [array.dtype for array in arrays])


def is_number(value: Any) -> bool:
    """Returns True for an array, or a Python number."""
    return is_array(value) or isinstance(value, int | float | complex)


def _is_distributed(value: Any) -> bool:
    return isinstance(value, DistributedValues)


def _is_leaf_of_sums(value: Any) -> bool:
    return is_variable(value) or isinstance(value, IndexedSlices)


def _rows_of(leaves: Sequence[Any], name: str) -> tuple[list[Any], int]:
    for leaf in leaves:
        if isinstance(leaf, PerReplica) and not leaf.is_equal and leaf.num_replicas > 1:
            raise PerReplicaUseError(
                f"{name} was given {leaf.description}, outside of strategy.run. Call it in the step function that "
                "strategy.run runs, where each replica has its own rows:\n"
                f"    strategy.run(step, args=(batch,))"
            )
    arrays = [leaf.as_array() if isinstance(leaf, DistributedValues) else leaf for leaf in leaves]
    shapes = [jnp.shape(array) if is_array(array) else () for array in arrays]
    rows = {shape[0] if shape else -1 for shape in shapes}
    if len(rows) != 1 or -1 in rows:
        raise InvalidArgumentError(
            f"{name} splits its first argument into micro-batches by rows, and the shapes of its leaves are {shapes}. "
            "Give it a pytree of arrays [rows, ...] with the same number of rows; pass all else as further arguments."
        )
    return list(map(jnp.asarray, arrays)), rows.pop()


def _dtype_of_total(dtype: Any) -> Any:
    """Returns the dtype in which values are added up: half precision cannot count, and small integers overflow."""
    return jnp.promote_types(dtype, jnp.float32 if jnp.issubdtype(dtype, jnp.inexact) else jnp.int32)


def _divided(total: Any, count: Any, dtype: Any) -> Any:
    result = dtype if jnp.issubdtype(dtype, jnp.inexact) else jnp.result_type(float)
    total = total.astype(_dtype_of_total(result))
    share = total / jnp.where(count == 0, 1, count).astype(total.dtype)
    return jnp.where(count == 0, 0, share).astype(result)


def _looped(
    flat: Callable[[Sequence[Any]], _Sums], arrays: Sequence[Any], groups: Groups, name: str
) -> _Sums:
    """Adds up the sums of micro-batches, one call after the other."""
    start, total = 0, None
    for number, rows in groups or [(1, 0)]:
        for _ in range(number):
            with counting():
                sums = flat([array[start : start + rows] for array in arrays])
            added = [array.astype(_dtype_of_total(array.dtype)) for array in sums.arrays]
            if total is not None:
                total.check_alike(sums, name)
                added = list(map(jnp.add, total.arrays, added))
            start, total = start + rows, _Sums(sums.tree, added, sums.dtypes)
    assert total is not None
    return total


@dataclass(frozen=True)
class _Trace:
    """The trace of a function for micro-batches of one size. Its inputs are constants, variables and rows."""

    jaxpr: Any
    consts: list[Any]
    sums: _Sums


def _scanned(
    capture: TracedCapture,
    flat: Callable[[Sequence[Any]], _Sums],
    arrays: Sequence[Any],
    groups: Groups,
    name: str,
) -> _Sums:
    """Adds up the sums of micro-batches in one scan for each size."""
    written: dict[int, tuple[Any, str]] = {}

    def traced(rows: int) -> _Trace:
        known = [variable for variable, _ in written.values()]
        values = [capture.read(variable) for variable in known]
        found: list[_Sums] = []

        def body(*given: Any) -> list[Any]:
            with capture.branch() as branch, counting():
                for variable, value in zip(known, given[: len(known)], strict=True):
                    branch.writes[id(variable)] = (variable, value, written[id(variable)][1])
                found.append(flat(given[len(known) :]))
                for key, (variable, _, line) in branch.writes.items():
                    written.setdefault(key, (variable, line))
                return [*found[0].arrays, *(branch.writes[id(variable)][1] for variable in known)]

        avals = [jax_compat.shaped((rows, *array.shape[1:]), array.dtype) for array in arrays]
        jaxpr, consts = jax_compat.trace(body, [*map(jax_compat.abstractify, values), *avals])
        return _Trace(jaxpr, consts, found[0])

    # A replica without rows takes part, too: it returns zeros, which depend on the variables as on the other replicas,
    # and assigns the variables that the others assign.
    groups = groups or [(0, 1)]
    sizes = [rows for _, rows in groups]
    while True:
        num_written = len(written)
        traces = [traced(rows) for rows in sizes]
        if len(written) == num_written:
            break
    sums = traces[0].sums
    for other in traces[1:]:
        sums.check_alike(other.sums, name)
    if any(rows in shape for shape in sums.shapes for rows in sizes):
        _check_another_size(traced, sizes[0] + 1, sums, name)

    variables = [variable for variable, _ in written.values()]
    totals = [jnp.zeros(array.shape, _dtype_of_total(array.dtype)) for array in sums.arrays]
    carry = [*totals, *map(capture.read, variables)]
    start = 0
    for (number, rows), trace in zip(groups, traces, strict=False):
        stop = start + number * rows
        xs = [array[start:stop].reshape(number, rows, *array.shape[1:]) for array in arrays]
        carry, _ = jax.lax.scan(functools.partial(_step, trace), carry, xs)
        start = stop
    for (variable, line), value in zip(written.values(), carry[len(totals) :], strict=True):
        capture.write(variable, value, line)
    return _Sums(sums.tree, carry[: len(totals)], sums.dtypes)


def _step(trace: _Trace, carry: Sequence[Any], rows: Sequence[Any]) -> tuple[list[Any], None]:
    number = len(trace.sums.arrays)
    outs = jax_compat.eval_jaxpr(trace.jaxpr, [*trace.consts, *carry[number:], *rows])
    outs = [jnp.asarray(out, old.dtype) for out, old in zip(outs, carry, strict=True)]
    return [*map(jnp.add, carry[:number], outs[:number]), *outs[number:]], None


def _check_another_size(traced: Callable[[int], _Trace], rows: int, sums: _Sums, name: str) -> None:
    """Raises if the shapes of sums depend on the number of rows. Only a trace with another number can show it."""
    try:
        other = traced(rows)
    except Exception:  # the function may be written for one size, which is no mistake
        return
    sums.check_alike(other.sums, name)

"""Gathers: where a variable that replicas divide becomes whole in a program.

A compiler that is left alone gathers all of them as early as it can, and keeps them until the backward pass: a model
needs the memory of all of its parameters after all. Here each equation that needs one, forward or backward, gathers it
anew, and may not before its other operands are there: ``optimization_barrier`` ties the two. (XLA on CPU drops the
barriers.)

It acts on programs that have been differentiated already, so that it matters neither how, nor what was computed again.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
from jax.sharding import NamedSharding, PartitionSpec

from replicax._src import jax_compat
from replicax._src.tracing.equations import called, evaluated, is_variable
from replicax._src.tracing.primitives import ELEMENTWISE, MOVES, REDUCTIONS, REMATERIALISES
from replicax._src.tracing.replication import is_call

LEAST_GATHERED_BYTES = 1 << 20
"""Smaller variables are gathered where a program begins: they need little memory, and each gather takes its time."""

# A variable that more equations need is gathered once: weights that many layers share, or all steps of an unrolled
# loop.
_MOST_GATHERS = 4


def is_large(num_bytes: int) -> bool:
    """Returns True if a variable is gathered where it is needed."""
    return num_bytes >= LEAST_GATHERED_BYTES


sharded_read_p = jax_compat.identity_primitive("replicax_sharded_read")
"""A variable that a step in the global view reads; params ``dim``, along which it is cut, and ``whole``, its sharding
gathered.
"""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A value in shards, to be gathered where it is needed.

    Attributes:
      shards: In the global view of the shape of the whole; of one replica its shard.
      dim: Along which it is cut.
      num_bytes: Of the whole.
      gather: From shards and their dim to the whole.
      is_global: ``shards`` is an array of the global view.
      later: Equations of one operand that are evaluated when it has been gathered.
      variable: Which variable it comes from; the same for all that is made of one.
    """

    shards: Any
    dim: int
    num_bytes: int
    gather: Callable[[Any, int], Any]
    is_global: bool = False
    later: tuple[Any, ...] = ()
    variable: Any = dataclasses.field(default_factory=object)

    def whole(self) -> Any:
        """Gathered now."""
        value = self.gather(self.shards, self.dim)
        for eqn in self.later:
            value = _applied(eqn, value)
        return value


def evaluate_gathering(jaxpr: Any, args: Sequence[Any], *, recomputes_gathers: bool = True) -> list[Any]:
    """Returns the outputs of a jaxpr without constvars, in a trace; what is ``Sharded`` among its arguments, or marked,
    is gathered late.

    Args:
      recomputes_gathers: What is computed once more on the way back gathers inside; else before it, for all of it.
    """
    is_marked = any(eqn.primitive is sharded_read_p for eqn in jaxpr.eqns)
    if not is_marked and not any(isinstance(arg, Sharded) for arg in args):
        return jax_compat.eval_jaxpr(jaxpr, args)  # once: the trial costs as much as a trace
    arrays = list(map(_shards_of, args))

    def evaluated(evaluation: _Evaluation, values: Sequence[Any]) -> list[Any]:
        return [evaluation.whole(out) for out in evaluation.run(jaxpr, _like(args, values))]

    trial = _Evaluation(frozenset(), recomputes_gathers)
    jax.eval_shape(lambda *values: evaluated(trial, values), *arrays)
    shared = frozenset(key for key, count in trial.num_gathers.items() if count > _MOST_GATHERS)
    return evaluated(_Evaluation(shared, recomputes_gathers), arrays)


@final
class _Evaluation:
    """One evaluation of a program.

    Args:
      at_once: The variables that are gathered where the program begins, by key.
      recomputes_gathers: See ``evaluate_gathering``.

    Attributes:
      num_gathers: Of each variable, by key.
    """

    def __init__(self, at_once: frozenset[Any], recomputes_gathers: bool):
        self._at_once, self._recomputes_gathers = at_once, recomputes_gathers
        self.num_gathers: collections.Counter[Any] = collections.Counter()
        # What scans stack that is wanted in shards only, and the equations, by id, that need not make it whole.
        self._scattered: dict[Any, _Scattered] = {}
        self._is_in_shards: set[int] = set()

    def run(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Returns the outputs of a jaxpr; they may be ``Sharded``."""
        self._scattered.update(_scattered_later(jaxpr))
        return evaluated(jaxpr, list(map(self._as_given, args)), self._outputs, consts)

    def _as_given(self, value: Any) -> Any:
        if isinstance(value, Sharded) and value.variable in self._at_once:
            return value.whole()
        return value

    def whole(self, value: Any) -> Any:
        """Returns an array, gathered if need be."""
        return self._tied([value])[0]

    def _outputs(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        name = eqn.primitive.name
        if eqn.primitive is sharded_read_p:
            return [self._as_given(_marked(eqn, operands[0]))]
        if id(eqn) in self._is_in_shards:
            return operands
        divided = [operand for operand in operands if isinstance(operand, Sharded)]
        if not divided:
            return jax_compat.bind_equation(eqn, operands)
        if name == "scan":
            return self._scan(eqn, operands)
        if name in REMATERIALISES:
            if not self._recomputes_gathers:
                return jax_compat.bind_equation(eqn, self._tied(operands))
            return self._recomputed(eqn, operands)
        if is_call(eqn):
            inner, consts, given = called(eqn, operands)
            return self.run(inner, given, consts)
        if len(divided) == 1 and _is_of_one(eqn):
            if divided[0].is_global and name in REDUCTIONS and not divided[0].later:
                return jax_compat.bind_equation(eqn, [divided[0].shards])
            if name in ("slice", "squeeze") and _leaves_shards(eqn, divided[0]):
                return [_sliced(eqn, divided[0])]
            if name in MOVES or name in ELEMENTWISE:
                return [_aside(eqn, operands, divided[0])]
        return jax_compat.bind_equation(eqn, self._tied(operands))

    def _tied(self, operands: Sequence[Any], kept: Sequence[int] = ()) -> list[Any]:
        """Returns the operands of an equation, gathered when all the others are there.

        Args:
          kept: Positions of those that stay in shards.
        """
        results = list(operands)
        late = [i for i, value in enumerate(operands) if isinstance(value, Sharded) and i not in kept]
        others = [i for i, value in enumerate(operands) if _can_wait(value)]
        shards = [operands[i].shards for i in late]
        if late and others:
            shards, values = jax.lax.optimization_barrier((shards, [operands[i] for i in others]))
            for i, value in zip(others, values, strict=True):
                results[i] = value
        for i, shard in zip(late, shards, strict=True):
            self.num_gathers[operands[i].variable] += 1
            results[i] = dataclasses.replace(operands[i], shards=shard).whole()
        return results

    def _recomputed(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """What is computed once more on the way back: its gathers are inside."""
        inner, consts, _ = called(eqn, operands)
        arrays = list(map(_shards_of, operands))

        def body(*values: Any) -> list[Any]:
            given = _like(operands, values)
            return [self.whole(out) for out in self.run(inner, given, consts)]

        jaxpr, more = jax_compat.trace(body, list(map(jax_compat.abstractify, arrays)))
        return jax_compat.bind_equation(eqn, [*more, *arrays], {**eqn.params, "jaxpr": jaxpr})

    def _scan(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """Returns a scan over slices of a variable gathers each where it is needed; any other variable is gathered
        before it.
        """
        num_consts, num_carry = jax_compat.scan_counts(eqn)
        length = eqn.params["length"]
        first = num_consts + num_carry
        kept = [i for i in range(first, len(operands)) if _can_be_sliced(operands[i], length)]
        values = self._tied(operands, kept)
        if not kept:
            return jax_compat.bind_equation(eqn, values)
        inner, consts = jax_compat.inner_jaxpr(eqn.params["jaxpr"])
        slices = {i: _slice_of(values[i], length) for i in kept}
        outputs: list[Any] = []

        def body(*given: Any) -> list[Any]:
            given_slices = [
                dataclasses.replace(slices[i], shards=value) if i in slices else value
                for i, value in enumerate(given)
            ]
            outs = self.run(inner, given_slices, consts)
            # A slice that is an output is one that the backward pass will need.
            outputs[:] = [
                out if i >= num_carry and _is_plain(out) else self._in_shards_later(eqn.outvars[i], out)
                for i, out in enumerate(outs)
            ]
            return list(map(_shards_of, outputs))

        avals = [
            jax_compat.abstractify(slices[i].shards) if i in slices else var.aval
            for i, var in enumerate(inner.invars)
        ]
        params = {**eqn.params, "jaxpr": jax.make_jaxpr(body)(*avals)}
        arrays = list(map(_shards_of, values))
        results = jax_compat.bind_equation(eqn, arrays, params)
        return [
            dataclasses.replace(out, shards=result, dim=out.dim + 1, num_bytes=out.num_bytes * length)
            if isinstance(out, Sharded)
            else result
            for out, result in zip(outputs, results, strict=True)
        ]

    def _in_shards_later(self, var: Any, value: Any) -> Any:
        """What a loop gives, or stacks as ``var``: summed and cut in the loop, where the stack would be behind it. All
        that a device ever has of a stack of gradients is its shard then.
        """
        value = self.whole(value)
        if var in self._scattered:
            scattered = self._scattered[var]
            self._is_in_shards.add(id(scattered.whole))
            for sharding in scattered.slices:
                value = jax.lax.with_sharding_constraint(value, sharding)
        return value


@dataclass(frozen=True)
class _Scattered:
    """What is asked of a stack.

    Attributes:
      slices: Shardings of a slice: whole, then in shards.
      whole: The equation that asks for the whole stack.
    """

    slices: Sequence[NamedSharding]
    whole: Any


def _scattered_later(jaxpr: Any) -> dict[Any, _Scattered]:
    """Returns the stacks of large slices of which a program asks only that they are whole, then in shards."""
    users = collections.defaultdict(list)
    for eqn in jaxpr.eqns:
        for atom in filter(is_variable, eqn.invars):
            users[atom].append(eqn)
    for atom in filter(is_variable, jaxpr.outvars):
        users[atom].append(None)

    def asking(var: Any) -> list[Any]:
        eqn = users[var][0] if len(users[var]) == 1 else None
        if eqn is None:
            return []
        if eqn.primitive.name == "sharding_constraint":
            return [eqn, *asking(eqn.outvars[0])]
        return asking(eqn.outvars[0]) if eqn.primitive.name in ELEMENTWISE and _is_of_one(eqn) else []

    found = {}
    for eqn in jaxpr.eqns:
        first = jax_compat.scan_counts(eqn)[1] if eqn.primitive.name == "scan" else len(eqn.outvars)
        for var in eqn.outvars[first:]:
            size = math.prod(var.aval.shape[1:]) * getattr(var.aval.dtype, "itemsize", 0)
            asked = asking(var)[:2] if is_large(size) else []
            slices = [one for one in (_of_slice(eqn.params["sharding"]) for eqn in asked) if one is not None]
            if len(slices) == 2:
                found[var] = _Scattered(slices, asked[0])
    return found


def _of_slice(sharding: Any) -> NamedSharding | None:
    """Returns the sharding of what is stacked; None where it is the slices that are divided among devices."""
    if not isinstance(sharding, NamedSharding) or (sharding.spec and sharding.spec[0] is not None):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _marked(eqn: Any, value: Any) -> Sharded:
    whole = eqn.params["whole"]
    return Sharded(
        value,
        eqn.params["dim"],
        _num_bytes(value),
        lambda shards, dim: jax.lax.with_sharding_constraint(shards, whole),
        is_global=True,
        variable=eqn.outvars[0],
    )


def _is_of_one(eqn: Any) -> bool:
    """Returns True if an equation takes one array, and else numbers."""
    numbers = [a for a in eqn.invars if isinstance(a, jax_compat.Literal) and not getattr(a.val, "shape", ())]
    return len(eqn.outvars) == 1 and len(numbers) == len(eqn.invars) - 1


def _aside(eqn: Any, operands: Sequence[Any], value: Sharded) -> Sharded:
    """What an equation makes of a value in shards, itself in shards."""
    result = eqn.outvars[0].aval
    size = _num_bytes(result)
    is_wider = result.dtype.itemsize > value.shards.dtype.itemsize
    if eqn.primitive.name in MOVES or value.later or is_wider:
        return dataclasses.replace(value, later=(*value.later, eqn), num_bytes=size)
    shards = list(map(_shards_of, operands))
    (made,) = jax_compat.bind_equation(eqn, shards)
    return dataclasses.replace(value, shards=made, num_bytes=size)


def _leaves_shards(eqn: Any, value: Sharded) -> bool:
    """Returns True if each device has its shard of a slice, which is large."""
    result, dim, params = eqn.outvars[0].aval, value.dim, eqn.params
    if value.later or not is_large(_num_bytes(result)):
        return False
    return "dimensions" in params or result.shape[dim] == eqn.invars[0].aval.shape[dim]


def _sliced(eqn: Any, value: Sharded) -> Sharded:
    """Returns a slice, or without dims of one row: gathered as a variable by itself."""
    params, dim = dict(eqn.params), value.dim
    if "dimensions" in params:
        dim -= sum(other < dim for other in params["dimensions"])
    else:
        params["limit_indices"] = tuple(
            value.shards.shape[i] if i == dim else end for i, end in enumerate(params["limit_indices"])
        )
    (shards,) = jax_compat.bind_equation(eqn, [value.shards], params)
    result = eqn.outvars[0]
    size = _num_bytes(result.aval)
    return dataclasses.replace(value, shards=shards, dim=dim, num_bytes=size, variable=result)


def _applied(eqn: Any, value: Any) -> Any:
    """Returns an equation of one array, and else numbers."""
    operands = [atom.val if isinstance(atom, jax_compat.Literal) else value for atom in eqn.invars]
    return jax_compat.bind_equation(eqn, operands)[0]


def _can_wait(value: Any) -> bool:
    """Returns True if a gather can be tied to an operand."""
    return isinstance(value, jax_compat.Tracer) and not jax_compat.is_typed_key(value.dtype)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Sharded) and not value.later


def _can_be_sliced(value: Any, length: int) -> bool:
    """Returns True if slices of a value are large, and each device has its shard of each."""
    return _is_plain(value) and value.dim > 0 and is_large(value.num_bytes // max(length, 1))


def _slice_of(value: Sharded, length: int) -> Sharded:
    """Returns a slice along the first dim, described."""
    shards = jax.ShapeDtypeStruct(value.shards.shape[1:], value.shards.dtype)
    return dataclasses.replace(
        value, shards=shards, dim=value.dim - 1, num_bytes=value.num_bytes // max(length, 1)
    )


def _shards_of(value: Any) -> Any:
    return value.shards if isinstance(value, Sharded) else value


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def _like(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Values in shards where operands are."""
    return [
        dataclasses.replace(operand, shards=value) if isinstance(operand, Sharded) else value
        for operand, value in zip(operands, values, strict=True)
    ]

"""Gathers: the places in a program where a sharded variable is gathered.

XLA by default gathers all sharded variables as early as it can and keeps them until the backward pass, so that a model
still needs the memory of all of its parameters. Here each equation that needs a variable, forward or backward, gathers
it again, after its other operands are computed: ``optimization_barrier`` ties the two. (XLA on CPU drops the barriers.)

This pass runs after differentiation, so it does not depend on how gradients are computed or what is rematerialised.
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

from replicax._src.devices.sharding_specs import dim_of, without
from replicax._src.devices.topology import SHARD_AXIS
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import called, evaluated, is_variable
from replicax._src.tracing.primitives import ELEMENTWISE, MOVES, REDUCTIONS, REMATERIALISES
from replicax._src.tracing.replication import is_call

LEAST_GATHERED_BYTES = 1 << 20
"""Smaller variables are gathered at the start of a program: they need little memory, and each gather takes time."""

# A variable that more equations need is gathered once, such as weights that many layers or unrolled steps share.
_MOST_GATHERS = 4


def is_large(num_bytes: int) -> bool:
    """Returns True if a variable is large enough to be gathered where it is needed."""
    return num_bytes >= LEAST_GATHERED_BYTES


sharded_read_p = jax_compat.identity_primitive("replicax_sharded_read")
"""A read of a variable in the global view. Params: ``spec``, as in ``Sharded``, ``mesh``, that of the replicas, and
``rows``, the ``RowShards`` for lookups.
"""


@dataclass(frozen=True, eq=False)
class Sharded:
    """A sharded value, to be gathered where it is needed.

    Attributes:
      shards: The array of the full shape in the global view; else this replica's shard.
      spec: The axes of each dim: ``SHARD_AXIS`` for the replicas, and those of logical devices.
      num_bytes: The size of the full value.
      gather: Returns the value that replicas compute with, given the shards and their spec.
      is_global: True if ``shards`` is an array of the global view.
      later: Equations of one operand to evaluate after the gather.
      variable: Identifies the variable that the value comes from.
    """

    shards: Any
    spec: PartitionSpec
    num_bytes: int
    gather: Callable[[Any, PartitionSpec], Any]
    is_global: bool = False
    later: tuple[Any, ...] = ()
    variable: Any = dataclasses.field(default_factory=object)

    def whole(self) -> Any:
        """Gathers the value now."""
        value = self.gather(self.shards, self.spec)
        for eqn in self.later:
            value = _applied(eqn, value)
        return value


def evaluate_gathering(jaxpr: Any, args: Sequence[Any], *, recomputes_gathers: bool = True) -> list[Any]:
    """Returns the outputs of a jaxpr without constvars, in a trace. Gathers ``Sharded`` or marked values late.

    Args:
      recomputes_gathers: True to gather inside of rematerialised computations; else before each of them.
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
      at_once: The keys of variables that are gathered at the start of the program.
      recomputes_gathers: See ``evaluate_gathering``.

    Attributes:
      num_gathers: The number of gathers of each variable, by key.
    """

    def __init__(self, at_once: frozenset[Any], recomputes_gathers: bool):
        self._at_once, self._recomputes_gathers = at_once, recomputes_gathers
        self.num_gathers: collections.Counter[Any] = collections.Counter()
        # The stacks of scans that are needed only sharded, and the ids of equations that need not gather them.
        self._scattered: dict[Any, _Scattered] = {}
        self._is_in_shards: set[int] = set()

    def run(self, jaxpr: Any, args: Sequence[Any], consts: Sequence[Any] = ()) -> list[Any]:
        """Returns the outputs of a jaxpr, which may be ``Sharded``."""
        self._scattered.update(_scattered_later(jaxpr))
        return evaluated(jaxpr, list(map(self._as_given, args)), self._outputs, consts)

    def _as_given(self, value: Any) -> Any:
        if isinstance(value, Sharded) and value.variable in self._at_once:
            return value.whole()
        return value

    def whole(self, value: Any) -> Any:
        """Returns the array, and gathers it if necessary."""
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
        """Returns the operands of an equation, and gathers sharded ones after all the others are computed.

        Args:
          kept: The positions of operands that stay sharded.
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
        """Evaluates a rematerialised computation with its gathers inside."""
        inner, consts, _ = called(eqn, operands)
        arrays = list(map(_shards_of, operands))

        def body(*values: Any) -> list[Any]:
            given = _like(operands, values)
            return [self.whole(out) for out in self.run(inner, given, consts)]

        jaxpr, more = jax_compat.trace(body, list(map(jax_compat.abstractify, arrays)))
        return jax_compat.bind_equation(eqn, [*more, *arrays], {**eqn.params, "jaxpr": jaxpr})

    def _scan(self, eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        """Evaluates a scan. Slices of a variable are gathered inside of it; other variables are gathered before it."""
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
            # The backward pass needs a slice that is an output.
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
            dataclasses.replace(
                out, shards=result, spec=PartitionSpec(None, *out.spec), num_bytes=out.num_bytes * length
            )
            if isinstance(out, Sharded)
            else result
            for out, result in zip(outputs, results, strict=True)
        ]

    def _in_shards_later(self, var: Any, value: Any) -> Any:
        """Returns the value that a loop gives or stacks as ``var``, summed and sharded inside of the loop.

        Each device then holds only its shard of a stack of gradients.
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
    """The requests for one stack.

    Attributes:
      slices: The shardings of a slice: replicated, then sharded.
      whole: The equation that requests the replicated stack.
    """

    slices: Sequence[NamedSharding]
    whole: Any


def _scattered_later(jaxpr: Any) -> dict[Any, _Scattered]:
    """Returns the stacks of large slices that a program only replicates and then shards."""
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
    """Returns the sharding of a stacked slice; None if the devices share out the slices themselves."""
    if not isinstance(sharding, NamedSharding) or (sharding.spec and sharding.spec[0] is not None):
        return None
    return NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))


def _marked(eqn: Any, value: Any) -> Sharded:
    mesh = eqn.params["mesh"]

    def gather(shards: Any, spec: PartitionSpec) -> Any:
        return jax.lax.with_sharding_constraint(shards, NamedSharding(mesh, without(spec, SHARD_AXIS)))

    return Sharded(
        value,
        eqn.params["spec"],
        _num_bytes(value),
        gather,
        is_global=True,
        variable=eqn.outvars[0],
    )


def _is_of_one(eqn: Any) -> bool:
    """Returns True if an equation takes one array, and otherwise only scalars."""
    numbers = [a for a in eqn.invars if isinstance(a, jax_compat.Literal) and not getattr(a.val, "shape", ())]
    return len(eqn.outvars) == 1 and len(numbers) == len(eqn.invars) - 1


def _aside(eqn: Any, operands: Sequence[Any], value: Sharded) -> Sharded:
    """Returns the sharded result of an equation for a sharded value."""
    result = eqn.outvars[0].aval
    size = _num_bytes(result)
    is_wider = result.dtype.itemsize > value.shards.dtype.itemsize
    if eqn.primitive.name in MOVES or value.later or is_wider:
        return dataclasses.replace(value, later=(*value.later, eqn), num_bytes=size)
    shards = list(map(_shards_of, operands))
    (made,) = jax_compat.bind_equation(eqn, shards)
    return dataclasses.replace(value, shards=made, num_bytes=size)


def _leaves_shards(eqn: Any, value: Sharded) -> bool:
    """Returns True if the value is large and each device has a shard of each slice."""
    result, params = eqn.outvars[0].aval, eqn.params
    if value.later or not is_large(_num_bytes(result)):
        return False
    shape = eqn.invars[0].aval.shape
    return "dimensions" in params or all(
        result.shape[dim] == shape[dim] for dim, axes in enumerate(value.spec) if axes is not None
    )


def _sliced(eqn: Any, value: Sharded) -> Sharded:
    """Returns a slice, or the value without dims of size 1. It is gathered like a separate variable."""
    params, spec = dict(eqn.params), value.spec
    if "dimensions" in params:
        spec = PartitionSpec(*[axes for dim, axes in enumerate(spec) if dim not in params["dimensions"]])
    else:
        dim = dim_of(spec, SHARD_AXIS)
        params["limit_indices"] = tuple(
            value.shards.shape[i] if i == dim else end for i, end in enumerate(params["limit_indices"])
        )
    (shards,) = jax_compat.bind_equation(eqn, [value.shards], params)
    result = eqn.outvars[0]
    size = _num_bytes(result.aval)
    return dataclasses.replace(value, shards=shards, spec=spec, num_bytes=size, variable=result)


def _applied(eqn: Any, value: Any) -> Any:
    """Evaluates an equation that takes one array, and otherwise only scalars."""
    operands = [atom.val if isinstance(atom, jax_compat.Literal) else value for atom in eqn.invars]
    return jax_compat.bind_equation(eqn, operands)[0]


def _can_wait(value: Any) -> bool:
    """Returns True if a gather can wait for an operand."""
    return isinstance(value, jax_compat.Tracer) and not jax_compat.is_typed_key(value.dtype)


def _is_plain(value: Any) -> bool:
    return isinstance(value, Sharded) and not value.later


def _can_be_sliced(value: Any, length: int) -> bool:
    """Returns True if slices of a value are large and each device has a shard of each."""
    return _is_plain(value) and value.spec[0] is None and is_large(value.num_bytes // max(length, 1))


def _slice_of(value: Sharded, length: int) -> Sharded:
    """Returns a description of a slice along the first dim."""
    shards = jax.ShapeDtypeStruct(value.shards.shape[1:], value.shards.dtype)
    spec = PartitionSpec(*value.spec[1:])
    return dataclasses.replace(value, shards=shards, spec=spec, num_bytes=value.num_bytes // max(length, 1))


def _shards_of(value: Any) -> Any:
    return value.shards if isinstance(value, Sharded) else value


def _num_bytes(aval: Any) -> int:
    return math.prod(aval.shape) * getattr(aval.dtype, "itemsize", 0)


def _like(operands: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Returns the values, ``Sharded`` where the operands are."""
    return [
        dataclasses.replace(operand, shards=value) if isinstance(operand, Sharded) else value
        for operand, value in zip(operands, values, strict=True)
    ]

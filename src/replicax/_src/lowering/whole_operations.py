"""Replicates the operands and results of operations that XLA's partitioner computes wrongly if it shards them.

All were seen on CPU with jax 0.10, most of them as silently wrong numbers:

- A scatter over padded rows that are each on several devices, such as the gradient of an embedding, includes the
  padding. A scatter into an array that is sharded over logical devices writes to wrong places. A scatter into padded
  rows, such as the gradient of a sort over the batch, aborts the process. So does one into more or fewer rows than the
  batch has, if they cannot be split evenly.
- The gradient of every n-th row, a pad between rows.
- The gradient of a pooling whose windows overlap at a shard boundary.
- The gradient of the kernel of a grouped convolution, such as a depthwise one, if each row is on several devices, and
  of a convolution that slides over the rows.
- A reduction over the rows by anything but a sum, a product, a maximum or a minimum, such as ``bitwise_xor`` or a
  user's function in ``jax.lax.reduce``, does not compile, because no collective has such a reduction.

A program does not show what is sharded before it is compiled, so the rules cover everything that may be.

A program is traced without the mesh. Three operations get it here, because JAX cannot lower them if some axes of the
mesh are automatic (jax 0.10 to 0.12): the index of a replica, debug callbacks and debug prints. So do gathers,
reduce-scatters and all-to-alls of a value that the program has just split over the logical devices, or of a variable
that they shard: each device moves only its shard (``Topology.collective_on_shards``). The sharding of other values is
not known, and XLA may gather them over the logical devices first.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, PartitionSpec

from replicax._src.devices.sharding_specs import Axes, axes_of, spec_of, without
from replicax._src.devices.topology import REPLICA_AXIS, SHARD_AXIS, Topology
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.equations import equations, equations_in, evaluated
from replicax._src.tracing.markers import logical_p, replicated_p
from replicax._src.tracing.program import ReplicaProgram, Variant, is_print

Rule = Callable[[Any], bool]
"""A rule returns True if an equation would be computed wrongly."""

Bind = Callable[[Any, Sequence[Any]], Sequence[Any]]
"""Evaluates an equation."""

# The dims along which these collectives split, join or stack their operand.
_MOVED_DIMS = {
    "all_gather": ("all_gather_dimension",),
    "reduce_scatter": ("scatter_dimension",),
    "all_to_all": ("split_axis", "concat_axis"),
}


# --- the rules ----------------------------------------------------------------------------------------------


def rule_of_batches(num_rows: int, topology: Topology, *, is_padded: bool) -> Rule:
    """Returns the rule for programs of a global batch, whose rows are split over the replicas.

    Args:
      is_padded: True if the rows cannot be split evenly.
    """
    is_on_several = topology.num_logical_devices > 1

    def is_wrong(eqn: Any) -> bool:
        if _is_scatter(eqn):
            operand, _, updates = (atom.aval.shape for atom in eqn.invars)
            if _may_have_rows(operand, num_rows):
                return is_padded
            if _may_have_rows(updates, num_rows):  # into a table
                return is_padded and is_on_several
            return True  # into some of the rows, or more
        if eqn.primitive.name == "pad":
            return _spreads_rows(eqn, num_rows)
        if _is_pooling(eqn):
            sizes = eqn.invars[1].aval.shape
            return num_rows in sizes and eqn.params["window_dimensions"][sizes.index(num_rows)] > 1
        if eqn.primitive.name == "conv_general_dilated" and is_on_several:
            return eqn.params["batch_group_count"] > 1 or _slides_over(eqn, num_rows)
        return _has_no_collective(eqn)

    return is_wrong


def is_wrong_in_replicas(eqn: Any) -> bool:
    """Returns True for wrong operations in programs of one replica, whose logical devices may shard any dim."""
    if _is_pooling(eqn):
        sizes, strides = eqn.params["window_dimensions"], eqn.params["window_strides"]
        return any(size > stride for size, stride in zip(sizes, strides, strict=True))
    return _is_scatter(eqn) or _has_no_collective(eqn)


def _needs_mesh(eqn: Any) -> bool:
    """Returns True for an operation whose lowering opens a ``shard_map`` over the mesh that the equation was made
    under.
    """
    return eqn.primitive.name == "axis_index" or is_print(eqn)


def _may_have_rows(shape: Sequence[int], num_rows: int) -> bool:
    """Returns True if an array of this shape may contain the rows, perhaps reshaped, and is not one such as a table."""
    return any(size > 0 and size % num_rows == 0 for size in shape)


def _is_scatter(eqn: Any) -> bool:
    return eqn.primitive.name.startswith("scatter")


def _is_pooling(eqn: Any) -> bool:
    """Returns True for the gradient of a maximum or minimum over windows, whose operands are the cotangents and the
    input.
    """
    return eqn.primitive.name in ("select_and_scatter_add", "select_and_gather_add")


def _has_no_collective(eqn: Any) -> bool:
    """Returns True for a reduction that no collective supports."""
    name = eqn.primitive.name
    if name in ("reduce_and", "reduce_or"):
        return eqn.invars[0].aval.dtype != bool
    return name in ("reduce", "reduce_xor")


def _spreads_rows(eqn: Any, num_rows: int) -> bool:
    """Returns True for a pad between the entries of a dim, unless another dim may have the rows."""
    sizes = eqn.invars[0].aval.shape
    return any(
        interior > 0 and not _may_have_rows(sizes[:dim] + sizes[dim + 1 :], num_rows)
        for dim, (_, _, interior) in enumerate(eqn.params["padding_config"])
    )


def _slides_over(eqn: Any, num_rows: int) -> bool:
    batch, feature, *spatial = eqn.params["dimension_numbers"].lhs_spec
    sizes = eqn.invars[0].aval.shape
    return num_rows in [sizes[dim] for dim in spatial] and num_rows not in (sizes[batch], sizes[feature])


def has_wrong(jaxpr: Any, is_wrong: Rule) -> bool:
    """Returns True if a program has an operation that a rule applies to, at any depth."""
    return any(map(is_wrong, equations(jaxpr)))


# --- the change ---------------------------------------------------------------------------------------------


def evaluate(
    jaxpr: Any,
    args: Sequence[Any],
    is_wrong: Rule,
    whole: Callable[[Any], Any],
    mesh: Any = None,
    moves: Mapping[int, Bind] | None = None,
) -> list[Any]:
    """Evaluates a jaxpr without constvars, in a trace. Replicates operands and results of operations that a rule names.

    Args:
      whole: Replicates an array.
      mesh: The abstract mesh for operations that need one, or None.
      moves: The evaluation of collectives that move shards, by the id of their equation in this jaxpr.
    """
    moves = moves or {}

    def is_changed(eqn: Any) -> bool:
        return is_wrong(eqn) or (mesh is not None and _needs_mesh(eqn))

    def results(eqn: Any, operands: list[Any]) -> list[Any]:
        if is_wrong(eqn):
            return list(map(whole, jax_compat.bind_equation(eqn, list(map(whole, operands)))))
        if id(eqn) in moves:
            return list(moves[id(eqn)](eqn, operands))
        params = None
        if any(map(is_changed, equations_in(eqn))):
            params = {name: _changed(param, is_wrong, whole, mesh) for name, param in eqn.params.items()}
        return jax_compat.bind_equation(eqn, operands, params, mesh if _needs_mesh(eqn) else None)

    return evaluated(jaxpr, args, results)


def _changed(param: Any, is_wrong: Rule, whole: Callable[[Any], Any], mesh: Any) -> Any:
    """Returns a parameter of an equation with the same change in its functions."""
    if isinstance(param, (tuple, list)) and any(map(jax_compat.is_jaxpr, param)):
        return type(param)(_changed(each, is_wrong, whole, mesh) for each in param)
    if not jax_compat.is_jaxpr(param):
        return param
    return jax_compat.retraced(param, lambda inner, args: evaluate(inner, args, is_wrong, whole, mesh))


def make_whole(program: ReplicaProgram, topology: Topology) -> ReplicaProgram:
    """Returns the program with such operations replicated over the logical devices of each replica."""

    def whole(value: Any) -> Any:
        return replicated_p.bind(value, mesh=topology.mesh, spec=PartitionSpec(*[None] * value.ndim))

    mesh = topology.mesh.abstract_mesh.update_axis_types({REPLICA_AXIS: AxisType.Manual})

    def changed(variant: Variant) -> Variant:
        moves = _moves_of_shards(variant, topology, mesh)
        if not moves and not has_wrong(
            variant.jaxpr, lambda eqn: is_wrong_in_replicas(eqn) or _needs_mesh(eqn)
        ):
            return variant
        return variant.retraced(
            lambda jaxpr, args: evaluate(jaxpr, args, is_wrong_in_replicas, whole, mesh, moves),
            [(REPLICA_AXIS, topology.num_replicas)],
        )

    return dataclasses.replace(program, variants=list(map(changed, program.variants)))


def _moves_of_shards(variant: Variant, topology: Topology, mesh: Any) -> dict[int, Bind]:
    """Returns the evaluation of the collectives whose operand has a known sharding, by the id of their equation."""
    if topology.num_replicas == 1:
        return {}
    state = variant.jaxpr.invars[len(variant.consts) : len(variant.consts) + len(variant.entries)]
    known: dict[Any, Axes] = {
        var: axes_of(without(entry.binding.layout.spec, SHARD_AXIS))
        for var, entry in zip(state, variant.entries, strict=True)
        if entry.binding.layout is not None
    }
    moves = {}
    for eqn in variant.jaxpr.eqns:
        if eqn.primitive is logical_p:
            free = PartitionSpec.UNCONSTRAINED
            spec = PartitionSpec(*[None if axes is free else axes for axes in eqn.params["spec"]])
            known[eqn.outvars[0]] = axes_of(spec)
        axes = known.get(eqn.invars[0]) if _is_move(eqn) else None
        after = axes and _axes_after(eqn, axes)
        if axes and after and any(axes):
            moves[id(eqn)] = _on_shards(topology, mesh, axes, after)
    return moves


def _is_move(eqn: Any) -> bool:
    """Returns True for an exchange of the arrays of replicas that is not a sum."""
    if eqn.primitive.name not in _MOVED_DIMS or isinstance(eqn.invars[0], jax_compat.Literal):
        return False
    names = eqn.params["axis_name"]
    return names == REPLICA_AXIS or tuple(names) == (REPLICA_AXIS,)


def _axes_after(eqn: Any, axes: Axes) -> Axes | None:
    """Returns the axes that shard the dims of the result; None if the collective moves along one that is sharded."""
    name, dims = eqn.primitive.name, [eqn.params[key] for key in _MOVED_DIMS[eqn.primitive.name]]
    if eqn.params["tiled"]:
        return None if any(axes[dim] for dim in dims) else axes
    if name == "all_gather":
        return (*axes[: dims[0]], (), *axes[dims[0] :])
    if name == "reduce_scatter" and not axes[dims[0]]:
        return (*axes[: dims[0]], *axes[dims[0] + 1 :])
    return None


def _on_shards(topology: Topology, mesh: Any, axes: Axes, after: Axes) -> Bind:
    def bind(eqn: Any, operands: Sequence[Any]) -> Sequence[Any]:
        def moved(shard: Any) -> Any:
            return jax_compat.bind_equation(eqn, [shard], mesh=jax.sharding.get_abstract_mesh())[0]

        with jax.sharding.use_abstract_mesh(mesh):
            return [topology.collective_on_shards(moved, operands[0], spec_of(axes), spec_of(after))]

    return bind

"""The costs of a program, read from its jaxpr: multiplications, their memory traffic, and collectives."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from replicax._src.devices.plan import Collective
from replicax._src.jax_internals import jax_compat

_KINDS = {
    "psum": "all-reduce",
    "psum_invariant": "all-reduce",
    "pmax": "all-reduce",
    "pmin": "all-reduce",
    "all_gather": "all-gather",
    "all_gather_invariant": "all-gather",
    "reduce_scatter": "reduce-scatter",
    "psum_scatter": "reduce-scatter",
    "all_to_all": "all-to-all",
    "ppermute": "collective-permute",
}


def merged(found: Sequence[Collective]) -> list[Collective]:
    """Merges equal collectives and adds their counts. The largest come first."""
    counts: collections.Counter[Any] = collections.Counter()
    for one in found:
        counts[dataclasses.replace(one, count=0)] += one.count
    return sorted(
        (dataclasses.replace(one, count=count) for one, count in counts.items()),
        key=lambda one: -one.bytes * one.count,
    )


def num_domains_of(members: Iterable[int], domain_size: int) -> int:
    """Returns the number of hosts or slices that have the devices with these numbers."""
    return len({member // domain_size for member in members})


@dataclass
class Costs:
    """The costs of a step on one device.

    Attributes:
      flops: FLOP of matrix products and convolutions by operand dtype; a multiplication and addition count as 2.
      matrix_bytes: The bytes of their operands and results, which pass through memory at least once.
      collectives: The collectives that the program requests.
      has_open_loops: True if there are loops whose length is known only when they run. They count as one step.
    """

    flops: dict[str, float] = field(default_factory=lambda: collections.defaultdict(float))
    matrix_bytes: float = 0.0
    collectives: list[Collective] = field(default_factory=list)
    has_open_loops: bool = False

    @property
    def total_flops(self) -> float:
        return sum(self.flops.values())


def costs_of(
    jaxpr: Any,
    num_devices: int,
    *,
    is_split: bool,
    domain_size: int | None = None,
    num_logical_devices: int = 1,
) -> Costs:
    """Returns the costs of a program on one of its devices.

    Args:
      jaxpr: The jaxpr of the full program. Inside of a ``shard_map``, shapes are those of one replica.
      is_split: True if code outside of a ``shard_map`` is split over the devices by rows (the global view). Otherwise
        each device runs all of it.
      domain_size: The number of devices of a host or slice; None for a single one.
      num_logical_devices: The number of logical devices of a replica. Each computes at least its share of the replica's
        work.
    """
    costs = Costs()
    of_replica = 1.0 / num_logical_devices
    share = 1.0 / num_devices if is_split else of_replica
    _add(costs, jaxpr, _Place(1.0, share, of_replica, {}, domain_size or num_devices))
    costs.flops = dict(costs.flops)
    costs.collectives = merged(costs.collectives)
    return costs


@dataclass(frozen=True)
class _Place:
    """The position of an equation in a program: the number of its runs, the part of it on one device (here and in the
    code of a replica), and the sizes of axes.
    """

    times: float
    share: float
    share_of_replica: float
    sizes: Mapping[str, int]
    domain_size: int


def _add(costs: Costs, jaxpr: Any, place: _Place) -> None:
    jaxpr = jax_compat.inner_jaxpr(jaxpr)[0]
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name in _KINDS:
            _add_collective(costs, eqn, place)
        elif name in ("dot_general", "conv_general_dilated"):
            count = _dot_flops(eqn) if name == "dot_general" else _conv_flops(eqn)
            often = place.times * place.share
            costs.flops[str(eqn.invars[0].aval.dtype)] += count * often
            costs.matrix_bytes += often * sum(
                size_of(v.aval) for v in [*eqn.invars, *eqn.outvars] if not jax_compat.is_drop_var(v)
            )
        elif name == "cond":
            _add_largest(costs, eqn, place)
        else:
            inner = _inside(costs, eqn, place)
            for sub in jax_compat.sub_jaxprs(eqn):
                _add(costs, sub, inner)


def _inside(costs: Costs, eqn: Any, place: _Place) -> _Place:
    name = eqn.primitive.name
    if name == "scan":
        return dataclasses.replace(place, times=place.times * eqn.params["length"])
    if name == "shard_map":
        return dataclasses.replace(place, share=place.share_of_replica, sizes=dict(eqn.params["mesh"].shape))
    if name == "while":
        costs.has_open_loops = True
    return place


def _add_largest(costs: Costs, eqn: Any, place: _Place) -> None:
    """Adds the branch of a condition with the most multiplications."""
    branches = []
    for sub in jax_compat.sub_jaxprs(eqn):
        branch = Costs()
        _add(branch, sub, place)
        branches.append(branch)
    largest = max(branches, key=lambda branch: branch.total_flops)
    for dtype, count in largest.flops.items():
        costs.flops[dtype] += count
    costs.matrix_bytes += largest.matrix_bytes
    costs.collectives += largest.collectives
    costs.has_open_loops |= any(branch.has_open_loops for branch in branches)


def size_of(aval: Any) -> int:
    """Returns the bytes of an array from its abstract value."""
    itemsize = getattr(aval.dtype, "itemsize", 4)
    return math.prod(aval.shape) * itemsize


def _dot_flops(eqn: Any) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    left = eqn.invars[0].aval.shape
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[i] for i in contracted)


def _conv_flops(eqn: Any) -> float:
    kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
    taps = math.prod(kernel[i] for i in spec[1:])  # inputs of a group and positions of the kernel
    holes = math.prod(eqn.params["lhs_dilation"])  # zeros between the inputs cost no multiplication
    return 2.0 * math.prod(eqn.outvars[0].aval.shape) * taps / holes


def _add_collective(costs: Costs, eqn: Any, place: _Place) -> None:
    kind = _KINDS[eqn.primitive.name]
    names = eqn.params.get("axes", eqn.params.get("axis_name"))
    axes = tuple(a for a in (names if isinstance(names, (tuple, list)) else (names,)) if isinstance(a, str))
    members = _members(axes, place.sizes)
    groups = eqn.params.get("axis_index_groups")
    if groups:
        members = [members[i] for i in groups[0]]
    size = len(members)
    if size < 2:
        return
    arrays = eqn.outvars if kind == "all-gather" else eqn.invars
    total = sum(size_of(v.aval) for v in arrays)
    if total:
        domains = num_domains_of(members, place.domain_size)
        costs.collectives.append(Collective(kind, total, size, round(place.times), axes, domains))


def _members(axes: Sequence[str], sizes: Mapping[str, int]) -> list[int]:
    """Returns the mesh numbers of the devices that exchange with the first device over some axes."""
    step_of, step = {}, 1
    for axis in reversed(list(sizes)):
        step_of[axis] = step
        step *= sizes[axis]
    ranges = [range(0, sizes[axis] * step_of[axis], step_of[axis]) for axis in axes if axis in sizes]
    return [sum(parts) for parts in itertools.product(*ranges)]

"""Specs: which axes of a mesh shard each dim of an array. A ``PartitionSpec`` writes one axis, several or None for a
dim."""

from __future__ import annotations

from collections.abc import Sequence

from jax.sharding import PartitionSpec

Axes = tuple[tuple[str, ...], ...]
"""For each dim, the axes that shard it, the outermost first; empty if none does."""


def axes_of(spec: PartitionSpec) -> Axes:
    """Returns the axes of the dims of a spec."""
    return tuple(() if dim is None else (dim,) if isinstance(dim, str) else tuple(dim) for dim in spec)


def spec_of(axes: Sequence[Sequence[str]]) -> PartitionSpec:
    """Returns the spec for the axes of the dims."""
    return PartitionSpec(*[None if not dim else dim[0] if len(dim) == 1 else tuple(dim) for dim in axes])


def dim_of(spec: PartitionSpec, axis: str) -> int | None:
    """Returns the dim that an axis shards; None if it shards none."""
    return next((dim for dim, axes in enumerate(axes_of(spec)) if axis in axes), None)


def without(spec: PartitionSpec, axis: str) -> PartitionSpec:
    """Returns a spec without one axis, over which the array is then replicated."""
    return spec_of([[each for each in axes if each != axis] for axes in axes_of(spec)])

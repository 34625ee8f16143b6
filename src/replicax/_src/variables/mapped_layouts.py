"""A ``LayoutMap`` on one strategy's devices: the axes of logical devices that shard each variable."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Mapping, Sequence
from typing import final

from replicax._src.devices.sharding_specs import Axes
from replicax._src.devices.topology import LOGICAL_AXIS, REPLICA_AXIS, Topology
from replicax._src.variables.layout_map import DimAxes, Layout, LayoutMap, shown
from replicax._src.vocabulary.errors import InvalidArgumentError

log = logging.getLogger("replicax")
_MAX_SHOWN = 3


@final
class MappedLayouts:
    """The axes that a layout map gives variables.

    Args:
      layout_map: The user's layout map.
      topology: The devices of the strategy.

    Raises:
      InvalidArgumentError: The map names an axis that the logical devices do not have.
    """

    def __init__(self, layout_map: LayoutMap, topology: Topology):
        self._map, self.topology = layout_map, topology
        self._unused = dict.fromkeys(layout_map)
        self._paths: dict[str, None] = {}
        self._paths_of_slots: dict[str, None] = {}
        self._warned: set[str] = set()
        self._sizes = {name: topology.mesh.shape[name] for name in topology.mesh.axis_names[1:]}
        for pattern, layout in layout_map.entries():
            self._check_axes(pattern, layout)

    def on(self, topology: Topology) -> MappedLayouts:
        """Returns the same layouts over other devices. Both share the record of patterns that matched a variable."""
        layouts = MappedLayouts(self._map, topology)
        layouts._unused, layouts._paths = self._unused, self._paths
        layouts._paths_of_slots, layouts._warned = self._paths_of_slots, self._warned
        return layouts

    def _check_axes(self, pattern: str, layout: Layout) -> None:
        known = [LOGICAL_AXIS, *(name for name in self._sizes if name != LOGICAL_AXIS)]
        for axis in (axis for axes in layout for axis in axes):
            if axis == REPLICA_AXIS:
                raise InvalidArgumentError(
                    f"The layout map's {pattern!r}: {shown(layout)} shards variables over {axis!r}. A layout map shards them over "
                    f"the logical devices of each replica: {_any_of(known)}. To shard over replicas use shard_state."
                )
            if axis not in known:
                raise InvalidArgumentError(
                    f"The layout map's {pattern!r}: {shown(layout)} names the axis {axis!r}. A replica has "
                    f"{self.topology.num_logical_devices} logical device(s), which are {_any_of(known)}. Write {LOGICAL_AXIS!r} for all of them. Axes of a "
                    "keras.distribution.LayoutMap are translated by LayoutMap.from_keras."
                )
        axes = [axis for dim in layout for axis in self._resolved(dim)]
        if len(set(axes)) < len(axes):
            raise InvalidArgumentError(
                f"The layout map's {pattern!r}: {shown(layout)} shards by an axis twice: {LOGICAL_AXIS!r} is all of "
                f"{_any_of(list(self._sizes))}."
            )

    def _resolved(self, axes: Sequence[str]) -> list[str]:
        """Returns the mesh axes for axes of the layout map."""
        return [name for axis in axes for name in ([*self._sizes] if axis == LOGICAL_AXIS else [axis])]

    def note(self, path: str) -> None:
        """Records the path of a new variable."""
        self._paths[path] = None
        pattern = self._map.pattern_of(path)
        if pattern is not None:
            self._unused.pop(pattern, None)

    def note_slot(self, path: str) -> None:
        """Records the path of an optimizer slot, which the map does not apply to."""
        self._paths_of_slots[path] = None

    def axes_of_path(self, path: str, shape: Sequence[int]) -> Axes:
        """Returns the axes of each dim of a variable with this path; fewer if the last dims are not sharded.

        Raises:
          InvalidArgumentError: The layout does not fit the shape.
        """
        self.note(path)
        pattern = self._map.pattern_of(path)
        if pattern is None:
            return ()
        layout = self._map[pattern] or ()
        dims = [tuple(self._resolved(axes)) for axes in layout]
        what = f"Variable {path!r} of shape {tuple(shape)} has the layout {shown(layout)} of the layout map's {pattern!r}"
        if len(dims) > len(shape):
            raise InvalidArgumentError(
                f"{what}, which is for {len(dims)} dims, but the variable has {len(shape)}. Give one entry per dim, or make the pattern "
                "match fewer variables."
            )
        for dim, (size, axes) in enumerate(zip(shape, dims, strict=False)):
            count = math.prod(self._sizes[axis] for axis in axes)
            if size % count:
                raise InvalidArgumentError(
                    f"{what}: dim {dim}, {size} long, is not divisible by its {count} logical devices. Shard another dim, or make "
                    f"this one {math.ceil(size / count) * count} long."
                )
        return tuple(dims)

    def check_used(self, *, is_training: bool) -> None:
        """Checks that every pattern has matched a variable.

        Call it after programs have met the variables, before the first step.

        Args:
          is_training: True to raise an error. False warns once, because another model may be made later.

        Raises:
          InvalidArgumentError: A pattern has matched no variable.
        """
        if not self._unused or not (is_training or self._paths):
            return
        listed = "\n".join(f"  {pattern!r}: {self._closest(pattern)}" for pattern in self._unused)
        told = (
            f"The layout map has patterns that match none of the {len(self._paths)} variables made so far, so each device "
            f"would hold all of their variables:\n{listed}\nA pattern is a regular expression that is searched for in the path of a "
            "variable (Keras's variable.path, the name of an rx.Variable). Correct it or leave it out. If its variables do not exist "
            "yet, make them before the first step."
        )
        if is_training:
            raise InvalidArgumentError(told)
        if not self._warned:
            self._warned.update(self._unused)
            log.warning("%s", told)

    def _closest(self, pattern: str) -> str:
        """Returns a text with the paths that are most similar to a pattern."""
        of_slots = [path for path in self._paths_of_slots if re.search(pattern, path)]
        if of_slots:
            return f"it matches {of_slots[0]!r}, an optimizer slot, which has the layout of its variable"
        plain = re.sub(r"\W+", " ", pattern)
        likeness = {path: difflib.SequenceMatcher(None, plain, path).ratio() for path in self._paths}
        closest = sorted(likeness, key=lambda path: -likeness[path])[:_MAX_SHOWN]
        return f"the closest paths are {', '.join(map(repr, closest))}" if closest else "there is none"


def layout_map_for(topology: Topology, given: LayoutMap | Mapping[str, DimAxes] | None) -> LayoutMap | None:
    """Returns the layout map that a user gives, for replicas of several devices; None for none.

    Raises:
      InvalidArgumentError: It is not a layout map, or shards variables but each replica has one device.
    """
    layout_map = None if given is None else LayoutMap.of(given)
    if layout_map is not None and topology.num_logical_devices == 1:
        for pattern, layout in layout_map.entries():
            if any(layout):
                raise InvalidArgumentError(
                    f"The layout map's {pattern!r}: {shown(layout)} shards variables over the devices of a replica, but each replica "
                    "has one. Give devices_per_replica, the number of devices of each replica, such as 2; or leave layout_map out."
                )
    return layout_map


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))

"""Layouts of variables over the logical devices of a replica: a ``LayoutMap`` on one strategy's devices."""

from __future__ import annotations

import difflib
import logging
import math
import re
from collections.abc import Sequence
from typing import Any, final

from jax.sharding import NamedSharding, PartitionSpec

from replicax._src.devices.topology import LOGICAL_AXIS, REPLICA_AXIS, Topology
from replicax._src.errors import InvalidArgumentError
from replicax._src.tracing.optimizer_slots import model_variable_of
from replicax._src.variables.layout_map import Layout, LayoutMap, shown
from replicax._src.variables.state_layouts import is_of_optimizer

log = logging.getLogger("replicax")
_MAX_SHOWN = 3


@final
class LogicalLayouts:
    """The layouts of one strategy's variables.

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
        self._paths_of_bindings: dict[str, None] = {}
        self._warned: set[str] = set()
        self._sizes = {name: topology.mesh.shape[name] for name in topology.mesh.axis_names[1:]}
        for pattern, layout in layout_map.entries():
            self._check_axes(pattern, layout)

    def on(self, topology: Topology) -> LogicalLayouts:
        """Returns the same layouts over other devices. Both share the record of patterns that matched a variable."""
        layouts = LogicalLayouts(self._map, topology)
        layouts._unused, layouts._paths = self._unused, self._paths
        layouts._paths_of_bindings, layouts._warned = self._paths_of_bindings, self._warned
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
                    f"{self.topology.num_logical_devices} logical device(s), which are {_any_of(known)}."
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

    def of(self, variable: Any) -> NamedSharding | None:
        """Returns the sharding of a variable; None if it is replicated."""
        owner = model_variable_of(variable)
        if owner is None and not is_of_optimizer(variable):
            return self.of_path(variable.path, variable.shape)
        self._paths_of_bindings[variable.path] = None
        return None if owner is None else self.of(owner)

    def note(self, variable: Any) -> None:
        """Records the path of a new variable. Its layout is looked up when a program first uses it."""
        if not is_of_optimizer(variable):
            self._paths[variable.path] = None
            pattern = self._map.pattern_of(variable.path)
            if pattern is not None:
                self._unused.pop(pattern, None)

    def of_path(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        """Returns the sharding of a variable with this path; None if it is replicated.

        Raises:
          InvalidArgumentError: The layout does not fit the shape.
        """
        self._paths[path] = None
        pattern = self._map.pattern_of(path)
        if pattern is None:
            return None
        self._unused.pop(pattern, None)
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
        if not any(dims):
            return None
        rest = [None] * (len(shape) - len(dims))
        return NamedSharding(self.topology.mesh, PartitionSpec(*[axes or None for axes in dims], *rest))

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
        of_bindings = [path for path in self._paths_of_bindings if re.search(pattern, path)]
        if of_bindings:
            return f"it matches {of_bindings[0]!r}, an optimizer slot, which has the layout of its variable"
        plain = re.sub(r"\W+", " ", pattern)
        likeness = {path: difflib.SequenceMatcher(None, plain, path).ratio() for path in self._paths}
        closest = sorted(likeness, key=lambda path: -likeness[path])[:_MAX_SHOWN]
        return f"the closest paths are {', '.join(map(repr, closest))}" if closest else "there is none"


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(map(repr, names))

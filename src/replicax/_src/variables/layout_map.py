"""``LayoutMap``: the sharding of variables over the logical devices of a replica, by patterns of their paths.

Pure: no jax.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, final

from replicax._src.vocabulary.errors import InvalidArgumentError

Layout = tuple[tuple[str, ...], ...]
"""For each dim, the axes that it is sharded over; empty if it is not sharded."""
DimAxes = Sequence[str | Sequence[str] | None]
"""A layout as users write it."""


@final
class LayoutMap(MutableMapping[str, Layout]):
    """Maps patterns of variable paths to the dims that a replica's logical devices shard.

    Keys are regular expressions for the paths of variables (Keras's ``variable.path``, the ``name`` of an
    ``rx.Variable``). A variable takes the entry whose key is its path; else the entry whose pattern matches the full
    path; else the entry whose pattern is found in it. A variable without a matching pattern is replicated. A pattern
    that matches no variable is an error before the first step that trains. Optimizer slots have the layout of their
    variable.

    A value has an entry for each dim: None if the dim is not sharded, ``"logical"`` if all logical devices shard it. If
    their number is not a prime, the axes ``"logical_0"``, ``"logical_1"``, ... are its prime factors, the smallest
    first: 4 devices shard two dims as ``("logical_0", "logical_1")``. Several axes may shard one dim: ``(None,
    ("logical_0", "logical_1"))``. Dims at the end may be left out.

    Pass it to a strategy whose replicas have several devices: ``MirroredStrategy(devices_per_replica=2,
    layout_map=...)``, or another one that takes it. A dict works too. ``rx.experimental.layouts.for_model`` makes one
    for a Keras model.

    Attributes:
      replicated: In a map of ``for_model``: the patterns of the variables that it leaves replicated, the largest first,
        each with the bytes and the reason. Empty in other maps.

    Args:
      layouts: A mapping with such entries. Others can be set later, one by one.

    Raises:
      InvalidArgumentError: A key is not a regular expression, or exists already; a value is not such a tuple. For a
        lookup: several patterns match the path equally well and have different values.

    Source: keras.distribution.LayoutMap, whose mesh axes may have any names.

    >>> import replicax as rx
    >>> layout_map = rx.experimental.LayoutMap({"up/kernel": (None, "logical")})
    >>> layout_map["down/kernel"] = ("logical", None)
    >>> layout_map["block_1/up/kernel"]
    ((), ('logical',))
    """

    def __init__(self, layouts: Mapping[str, DimAxes] | None = None):
        self._layouts: dict[str, Layout] = {}
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.replicated: dict[str, str] = {}
        layouts = {} if layouts is None else layouts
        if not isinstance(layouts, Mapping):
            raise _no_map(layouts)
        for pattern, layout in layouts.items():
            self[pattern] = layout

    @classmethod
    def of(cls, given: LayoutMap | Mapping[str, DimAxes]) -> LayoutMap:
        """Returns a copy of a map, or of a dict of its entries."""
        if isinstance(given, LayoutMap):
            copy = cls(given._layouts)
            copy.replicated = dict(given.replicated)
            return copy
        if isinstance(given, Mapping):
            return cls(given)
        raise _no_map(given)

    @classmethod
    def from_keras(cls, layout_map: Any, axes: Mapping[str, str | None] | None = None) -> LayoutMap:
        """Returns the layouts of a ``keras.distribution.LayoutMap``.

        Its patterns match the full path only, as in Keras. Entries that shard no dim over logical devices are left out.

        Args:
          layout_map: Keras's map.
          axes: For each axis of Keras's mesh the axis of the layout map, or None to ignore it. By default ``"model"``
            is ``"logical"``, and ``"data"`` and ``"batch"`` are ignored: ``shard_state`` shards over replicas.

        Raises:
          InvalidArgumentError: It is not such a map, or names an axis that is not in ``axes``.

        Source: keras.distribution.LayoutMap.
        """
        known = {"model": "logical", "data": None, "batch": None} if axes is None else axes
        if isinstance(layout_map, (cls, dict)) or not isinstance(layout_map, Mapping):
            raise InvalidArgumentError(
                f"LayoutMap.from_keras takes a keras.distribution.LayoutMap, got {layout_map!r}. "
                "rx.experimental.LayoutMap takes a dict."
            )
        layouts = cls()
        for pattern in layout_map:
            dims = layout_map[pattern].axes
            for axis in dims:
                if axis is not None and axis not in known:
                    raise InvalidArgumentError(
                        f"Keras's layout map shards {pattern!r} over {axis!r}: {dims!r}. Say what that axis is: "
                        f"LayoutMap.from_keras(layout_map, axes={{{axis!r}: 'logical', ...}}), or None to ignore it. Known are "
                        f"{', '.join(map(repr, known))}."
                    )
            layout = tuple(None if axis is None else known[axis] for axis in dims)
            if any(layout):
                layouts[f"^(?:{pattern})$"] = layout
        return layouts

    def __setitem__(self, pattern: str, layout: DimAxes) -> None:
        if pattern in self._layouts:
            raise InvalidArgumentError(
                f"The layout map has {pattern!r} already, as {shown(self._layouts[pattern])}. Delete that entry first, or leave "
                "one of them out."
            )
        if not isinstance(pattern, str):
            raise InvalidArgumentError(f"The keys of a layout map are regular expressions, got {pattern!r}.")
        try:
            compiled = re.compile(pattern)
        except re.error as error:
            raise InvalidArgumentError(
                f"The layout map's {pattern!r} is not a regular expression ({error})."
            ) from None
        self._layouts[pattern] = _checked(pattern, layout)
        self._patterns[pattern] = compiled

    def __getitem__(self, path: str) -> Layout | None:  # type: ignore[override]
        """Returns the layout for a path; None where no pattern matches."""
        pattern = self.pattern_of(path)
        return None if pattern is None else self._layouts[pattern]

    def pattern_of(self, path: str) -> str | None:
        """Returns the key of the entry for a path; None where there is none."""
        if path in self._layouts:
            return path
        for matches in (re.Pattern.fullmatch, re.Pattern.search):
            found = [key for key, pattern in self._patterns.items() if matches(pattern, path)]
            if len({self._layouts[key] for key in found}) > 1:
                several = ", ".join(f"{key!r}: {shown(self._layouts[key])}" for key in found)
                raise InvalidArgumentError(
                    f"Variable {path!r} is matched by several patterns of the layout map: {several}. Make them so that one "
                    f"matches, or add an entry for this path, which takes precedence: layout_map[{path!r}] = "
                    f"{shown(self._layouts[found[0]])}."
                )
            if found:
                return found[0]
        return None

    def __delitem__(self, pattern: str) -> None:
        del self._layouts[pattern], self._patterns[pattern]

    def __contains__(self, pattern: object) -> bool:
        return pattern in self._layouts

    def __iter__(self) -> Iterator[str]:
        return iter(self._layouts)

    def __len__(self) -> int:
        return len(self._layouts)

    def entries(self) -> Iterator[tuple[str, Layout]]:
        """Returns the patterns and their layouts."""
        return iter(self._layouts.items())

    def __repr__(self) -> str:
        inner = ", ".join(f"{pattern!r}: {shown(layout)}" for pattern, layout in self.entries())
        return f"LayoutMap({{{inner}}})"


def _checked(pattern: str, layout: DimAxes) -> Layout:
    if isinstance(layout, (tuple, list)):
        dims = [_axes(dim) for dim in layout]
        if all(dim is not None for dim in dims):
            axes = [axis for dim in dims for axis in dim or ()]
            repeated = sorted({axis for axis in axes if axes.count(axis) > 1})
            if repeated:
                raise InvalidArgumentError(
                    f"The layout map's {pattern!r} shards several dims over {repeated[0]!r}: {layout!r}. Each axis shards one dim."
                )
            return tuple(dim or () for dim in dims)
    raise InvalidArgumentError(
        f"The layout map's {pattern!r} must have an entry for each dim, None or 'logical', such as (None, 'logical'); got "
        f"{layout!r}."
    )


def _axes(dim: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Returns the axes that one dim is sharded over; None for an invalid entry."""
    if dim is None:
        return ()
    names = (dim,) if isinstance(dim, str) else dim
    is_names = isinstance(names, (tuple, list)) and all(isinstance(name, str) for name in names)
    return tuple(names) if is_names else None


def shown(layout: Layout) -> str:
    """Returns a layout in the form in which users write it."""
    dims = [None if not axes else axes[0] if len(axes) == 1 else axes for axes in layout]
    return repr(tuple(dims))


def _no_map(given: Any) -> InvalidArgumentError:
    return InvalidArgumentError(
        f"layout_map must be an rx.experimental.LayoutMap, or a dict such as {{'up/kernel': (None, 'logical')}}; got {given!r}."
    )

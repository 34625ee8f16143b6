"""The rules by which the variables of layers are sharded over the logical devices of a replica.

Pure: neither jax nor Keras. A rule sees the kind of a layer and the shapes of its variables.

========================================  ====================  =========================================
a layer                                   its role              what is sharded
========================================  ====================  =========================================
makes heads: query, key, value            columns               kernel and bias, the dim of the heads
takes heads: attention_output             rows                  kernel, the dim of the heads
first of a pair: up, gate                 columns               kernel and bias, the dim of the outputs
second of a pair: down                    rows                  kernel, the dim of the inputs
not of a pair, makes more than it takes   columns               kernel and bias, the dim of the outputs
not of a pair, others                     replicated
embedding                                 rows                  embeddings, the dim of the vocabulary
untied reverse of an embedding            columns               reverse_embeddings, that of the vocabulary
others                                    replicated
========================================  ====================  =========================================

A pair needs one sum over the devices, after its second layer. A dim that does not divide leaves its layer replicated.

Source: Shoeybi et al., Megatron-LM, arXiv:1909.08053, section 3.
"""

from __future__ import annotations

import enum
import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, final

from replicax._src.drawing.text import size
from replicax._src.variables.layout_map import LayoutMap

DENSE: Final = "ab,bc->ac"
"""The equation of a dense layer."""

_LEAST_ROWS: Final = 8
"""A shard of an embedding has this many rows at least: fewer cost more time than they save memory."""

_PROJECTION = re.compile(r"(^|_)(query|key|value)(_|$)|^[qkv]_proj")
"""Names of dense layers that make queries, keys or values in one dim, so that heads cannot be told from shapes."""


@dataclass(frozen=True)
class LayerVariable:
    """A variable of a layer: its path in the model, shape and bytes."""

    path: str
    shape: tuple[int, ...]
    num_bytes: int


@dataclass(frozen=True, eq=False)
class ModelLayer:
    """A layer with variables.

    Attributes:
      kind: The name of its class.
      variables: Its variables by name.
      equation: The einsum of its inputs and its kernel, if that is what it computes.
      is_embedding: True if it looks up rows of ``embeddings``.
    """

    kind: str
    variables: Mapping[str, LayerVariable]
    equation: str | None = None
    is_embedding: bool = False

    @property
    def path(self) -> str:
        return next(iter(self.variables.values())).path.rpartition("/")[0]

    @property
    def parent(self) -> str:
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        return self.path.rpartition("/")[2]


@dataclass(frozen=True)
class Choice:
    """The layout that a rule chooses for a variable; an empty one and the reason if it is replicated."""

    variable: LayerVariable
    layout: tuple[str | None, ...] = ()
    reason: str = ""


class _Role(enum.Enum):
    COLUMNS = enum.auto()
    ROWS = enum.auto()


@final
class _Einsum:
    """The dims of an einsum layer's kernel, from its equation.

    Attributes:
      taken: The dims of the kernel that are summed over.
      made: The dims that only the kernel has.
    """

    def __init__(self, layer: ModelLayer):
        inputs, self._kernel, self._result = re.split(",|->", (layer.equation or "").replace(".", ""))
        self.shape = layer.variables["kernel"].shape
        self.is_projection = bool(_PROJECTION.search(layer.name))
        self.taken = [i for i, dim in enumerate(self._kernel) if dim in inputs and dim not in self._result]
        self.made = [i for i, dim in enumerate(self._kernel) if dim not in inputs]
        self.is_known = len(self.taken) + len(self.made) == len(self.shape)
        self.makes_heads = self.is_known and len(self.taken) == 1 < len(self.made)
        self.takes_heads = self.is_known and len(self.made) == 1 < len(self.taken)
        self.is_matrix = self.is_known and len(self.made) == len(self.taken) == 1

    @property
    def num_taken(self) -> int:
        return self.shape[self.taken[0]]

    @property
    def num_made(self) -> int:
        return self.shape[self.made[0]]

    def dim_of_bias(self, rank: int) -> int:
        """Returns the dim of a bias that belongs to the kernel's first made dim. A bias ends with the result's dims."""
        return rank - len(self._result) + self._result.index(self._kernel[self.made[0]])

    def joins(self, first: _Einsum) -> bool:
        """True if it is beside the first layer of a pair, as a gate or as another projection."""
        if self.makes_heads or first.makes_heads:
            return self.makes_heads and first.makes_heads
        if self.is_projection or first.is_projection:
            return self.is_projection and first.is_projection
        return self.shape == first.shape and self.num_taken != self.num_made

    def completes(self, first: _Einsum) -> bool:
        """True if it takes what the first layer of a pair makes."""
        if self.takes_heads:
            return True
        if not self.is_matrix or (self.is_projection and first.is_projection):
            return False
        # Heads may lie in one dim behind the attention: there are as many as the first made.
        return self.num_taken % first.num_made == 0 if first.makes_heads else self.num_taken == first.num_made


def choose_layouts(layers: Sequence[ModelLayer], num_devices: int) -> list[Choice]:
    """Returns a layout for each variable of the layers, which are in the order in which the model calls them."""
    einsums = {layer: _Einsum(layer) for layer in layers if layer.equation and "kernel" in layer.variables}
    roles: dict[ModelLayer, tuple[_Role, int]] = {}
    by_parent: dict[str, list[ModelLayer]] = {}
    for layer in einsums:
        by_parent.setdefault(layer.parent, []).append(layer)
    for siblings in by_parent.values():
        roles.update(_roles(siblings, einsums))
    choices: list[Choice] = []
    for layer in layers:
        if layer.is_embedding:
            choices += _of_embedding(layer, num_devices)
        elif layer in einsums:
            choices += _of_einsum(layer, einsums[layer], roles.get(layer), num_devices)
        else:
            choices += _replicated(layer, f"no rule is for a {layer.kind}")
    return choices


def _roles(
    siblings: Sequence[ModelLayer], einsums: Mapping[ModelLayer, _Einsum]
) -> Iterator[tuple[ModelLayer, tuple[_Role, int]]]:
    """Yields the role of each layer that has one, and the number that devices must divide."""
    firsts: list[ModelLayer] = []

    def unpaired() -> Iterator[tuple[ModelLayer, tuple[_Role, int]]]:
        for layer in firsts:
            einsum = einsums[layer]
            if einsum.makes_heads or einsum.num_made > einsum.num_taken:
                yield layer, (_Role.COLUMNS, einsum.num_made)
        firsts.clear()

    for layer in siblings:
        einsum = einsums[layer]
        first = einsums[firsts[0]] if firsts else None
        if einsum.takes_heads:
            yield from unpaired()
            yield layer, (_Role.ROWS, einsum.num_taken)
        elif first is not None and einsum.completes(first):
            for each in firsts:  # the number of heads of a smaller key is unknown
                if first.makes_heads or einsums[each].num_made == first.num_made:
                    yield each, (_Role.COLUMNS, einsums[each].num_made)
            yield layer, (_Role.ROWS, first.num_made)
            firsts.clear()
        elif einsum.makes_heads or einsum.is_matrix:
            if first is None or not einsum.joins(first):
                yield from unpaired()
            firsts.append(layer)
    yield from unpaired()


def _of_einsum(
    layer: ModelLayer, einsum: _Einsum, role: tuple[_Role, int] | None, num_devices: int
) -> Iterator[Choice]:
    kernel, bias = layer.variables["kernel"], layer.variables.get("bias")
    if role is None or role[1] % num_devices:
        what = "heads" if einsum.makes_heads or einsum.takes_heads else "units"
        of_pair = "it is not of a pair of layers, the first sharded by columns and the second by rows"
        reason = of_pair if role is None else f"its {what} ({role[1]}) do not divide by {num_devices} devices"
        yield from _replicated(layer, reason)
        return
    is_rows = role[0] is _Role.ROWS
    yield Choice(kernel, _sharded(len(kernel.shape), (einsum.taken if is_rows else einsum.made)[0]))
    if bias is not None:
        dim = einsum.dim_of_bias(len(bias.shape))
        if is_rows or dim < 0:
            reason = (
                "it is added after the sum over the devices" if is_rows else "it has no dim that is divided"
            )
            yield Choice(bias, (), reason)
        else:
            yield Choice(bias, _sharded(len(bias.shape), dim))
    yield from _replicated(
        layer, f"no rule is for this variable of a {layer.kind}", besides=("kernel", "bias")
    )


def _of_embedding(layer: ModelLayer, num_devices: int) -> Iterator[Choice]:
    for name, dim in (("embeddings", 0), ("reverse_embeddings", 1)):
        if name in layer.variables:
            variable = layer.variables[name]
            rows = variable.shape[dim]
            if rows % num_devices:
                more = math.ceil(rows / num_devices) * num_devices
                reason = f"its rows ({rows}) do not divide by {num_devices} devices; {more} do"
                yield Choice(variable, (), reason)
            elif rows < _LEAST_ROWS * num_devices:
                yield Choice(variable, (), f"its rows ({rows}) are too few for {num_devices} devices")
            else:
                yield Choice(variable, _sharded(len(variable.shape), dim))
    besides = ("embeddings", "reverse_embeddings")
    yield from _replicated(layer, f"no rule is for this variable of a {layer.kind}", besides=besides)


def _replicated(layer: ModelLayer, reason: str, besides: Iterable[str] = ()) -> Iterator[Choice]:
    for name, variable in layer.variables.items():
        if name not in besides:
            yield Choice(variable, (), reason)


def _sharded(rank: int, dim: int) -> tuple[str | None, ...]:
    return tuple("logical" if i == dim else None for i in range(rank))


# --- choices as a map ----------------------------------------------------------------------------------


def layout_map_of(choices: Sequence[Choice], automatic: Iterable[str]) -> LayoutMap:
    """Returns a layout map with these choices.

    The number in a name stands for any number if all such variables have one layout, so that the map has few entries
    and is right for a second model, whose layers Keras numbers on.

    Args:
      choices: A choice for each variable of a model.
      automatic: Names that Keras gives to layers without a name, without their numbers.
    """
    names = frozenset(automatic)
    groups: dict[str, list[Choice]] = {}
    for choice in choices:
        groups.setdefault(_pattern(choice.variable.path, names), []).append(choice)
    layout_map = LayoutMap()
    for pattern, group in groups.items():
        layouts = {choice.layout for choice in group}
        if len(layouts) == 1:
            if group[0].layout:
                layout_map[pattern] = group[0].layout
            continue
        of_path: dict[str, set[tuple[str | None, ...]]] = {}
        for choice in group:
            of_path.setdefault(choice.variable.path, set()).add(choice.layout)
        for path, layouts in of_path.items():  # several variables of one path may need several layouts
            (layout,) = layouts if len(layouts) == 1 else [()]
            if layout:
                layout_map[re.escape(path)] = layout
    for path in [choice.variable.path for choice in choices if not choice.layout]:
        if path not in layout_map and any(re.search(pattern, path) for pattern in layout_map):
            layout_map[path] = ()  # a part of it looks like the full path of another variable
    layout_map.replicated = dict(_replicated_lines(groups))
    return layout_map


def _pattern(path: str, automatic: frozenset[str]) -> str:
    *names, last = path.split("/")
    return "/".join([*(_any_number(name, automatic) for name in names), re.escape(last)])


def _any_number(name: str, automatic: frozenset[str]) -> str:
    base, number = re.fullmatch(r"(.*?)(?:_(\d+))?", name).groups()  # type: ignore[union-attr]
    if base in automatic:
        return rf"{re.escape(base)}(_\d+)?"
    return re.escape(name) if number is None else rf"{re.escape(base)}_\d+"


def _replicated_lines(groups: Mapping[str, Sequence[Choice]]) -> list[tuple[str, str]]:
    """Returns the patterns of replicated variables, the largest first, with their bytes and the reason."""
    found = []
    for pattern, group in groups.items():
        for reason, of_reason in itertools.groupby(
            [choice for choice in group if not choice.layout], key=lambda choice: choice.reason
        ):
            num_bytes = sum(choice.variable.num_bytes for choice in of_reason)
            found.append((num_bytes, pattern, reason))
    found.sort(key=lambda each: -each[0])
    return [(pattern, f"{size(num_bytes)}: {reason}") for num_bytes, pattern, reason in found]


def excess_of_device(choices: Sequence[Choice], num_devices: int) -> tuple[float, float]:
    """Returns what one device holds relative to an even part of all bytes, and the bytes beyond that part."""
    even = sum(choice.variable.num_bytes for choice in choices) / num_devices
    held = sum(choice.variable.num_bytes / (num_devices if choice.layout else 1) for choice in choices)
    return (held / even if even else 1.0), held - even

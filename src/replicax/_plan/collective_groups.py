"""The devices of a mesh that exchange in a collective: groups printed in HLO, and the axes of the mesh that they
span.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(?P<counts>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[(?P<axes>[^\]]*)\](?:, device_ids=\((?P<ids>.*?)\)(?= \{))?[^{]*\{(?P<over>[^}]*)\}"
)
_IDS = re.compile(r"\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_OVER = re.compile(r"'(?P<axis>\w+)'(?::\((?P<before>\d+)\)(?P<size>\d+))?")


def first_group(text: str) -> list[int] | None:
    """Returns the devices of the first group by their number in the mesh; None if an instruction names none, so that
    all devices exchange.

    Args:
      text: The text of the instruction. It lists groups, ``{{0,1},{2,3}}``, or describes them: ``[2,2]<=[4]`` is 0 to 3
        in two rows, and ``[2,2]<=[2,2]T(1,0)`` is the same square transposed. It can also name the axes of a mesh,
        ``mesh['a'=2,'b'=2] {'b'}``. The devices of that mesh may be in another order, as in ``mesh['a'=2,'b'=4],
        device_ids=([4,2]T(1,0)) {'b'}``. A part of an axis is ``{'b':(2)2}``, the second factor of 4 = 2 x 2.
    """
    listed, iota, mesh = _LISTED.search(text), _IOTA.search(text), _MESH.search(text)
    if listed:
        return _numbers(listed[1])
    if mesh:
        return _group_in_mesh(mesh)
    return None if iota is None else _in_order(iota).reshape(_numbers(iota["counts"]))[0].tolist()


def _group_in_mesh(mesh: re.Match[str]) -> list[int]:
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh["axes"])}
    ids = mesh["ids"] and _IDS.search(mesh["ids"])
    devices = (
        _in_order(ids) if ids else np.array(_numbers(mesh["ids"] or "") or range(math.prod(sizes.values())))
    )
    places: dict[str, Any] = dict.fromkeys(sizes, 0)
    for over in _OVER.finditer(mesh["over"]):
        size = sizes[over["axis"]]
        outer, inner = int(over["before"] or 1), int(over["size"] or size)
        places[over["axis"]] = slice(0, size // outer, size // outer // inner)
    return devices.reshape(tuple(sizes.values()))[tuple(places.values())].reshape(-1).tolist()


def _in_order(iota: re.Match[str]) -> np.ndarray:
    shape = _numbers(iota["shape"])
    order = _numbers(iota["order"]) if iota["order"] else range(len(shape))
    return np.arange(math.prod(shape)).reshape(shape).transpose(order)


def axes_of(group: Sequence[int] | None, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the axes of a mesh along which the devices of a group differ.

    Args:
      group: None for all devices.
      sizes: The sizes of the mesh by axis.
    """
    if group is None:
        return tuple(name for name, size in sizes.items() if size > 1)
    places = np.unravel_index(group, tuple(sizes.values()))
    return tuple(name for name, along in zip(sizes, places, strict=True) if len(set(along.tolist())) > 1)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]

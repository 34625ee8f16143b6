"""The devices of a mesh that exchange in a collective: groups printed in HLO, and the axes of the mesh that they
span.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{\{([\d,]*)\}")
_IOTA = re.compile(r"replica_groups=\[(?P<counts>[\d,]+)\]<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[(?P<axes>[^\]]*)\][^{]*\{(?P<over>[^}]*)\}")


def first_group(text: str) -> list[int] | None:
    """Returns the devices of the first group by their number in the mesh; None if an instruction names none, so that
    all devices exchange.

    Args:
      text: The text of the instruction. It lists groups, ``{{0,1},{2,3}}``, or describes them: ``[2,2]<=[4]`` is 0 to 3
        in two rows, and ``[2,2]<=[2,2]T(1,0)`` is the same square transposed. It can also name the axes of a mesh,
        ``mesh['a'=2,'b'=2] {'b'}``.
    """
    listed, iota, mesh = _LISTED.search(text), _IOTA.search(text), _MESH.search(text)
    if listed:
        return _numbers(listed[1])
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh["axes"])}
        over = re.findall(r"'(\w+)'", mesh["over"])
        grid = np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values()))
        return grid[tuple(slice(None) if name in over else 0 for name in sizes)].reshape(-1).tolist()
    if iota is None:
        return None
    shape = _numbers(iota["shape"])
    order = _numbers(iota["order"]) if iota["order"] else range(len(shape))
    devices = np.arange(math.prod(shape)).reshape(shape).transpose(order)
    return devices.reshape(_numbers(iota["counts"]))[0].tolist()


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

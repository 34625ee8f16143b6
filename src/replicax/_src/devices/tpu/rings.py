"""Closed paths through a mesh of chips. Neighbours on the path, also its last and first chip, are neighbours in the
mesh.
"""

from __future__ import annotations

import itertools

Place = tuple[int, int, int]


def ring(x_size: int, y_size: int, z_size: int) -> list[Place]:
    """Returns all chips of a mesh in the order of a ring, from (0, 0, 0).

    A mesh with one direction gives a line, and one with an odd size is read row by row. These paths do not close.

    >>> ring(2, 2, 1)
    [(0, 0, 0), (1, 0, 0), (1, 1, 0), (0, 1, 0)]
    """
    sizes = (x_size, y_size, z_size)
    wide = [dim for dim in range(3) if sizes[dim] > 1]
    if len(wide) <= 1 or any(sizes[dim] % 2 for dim in wide):
        return [(x, y, z) for z, y, x in itertools.product(*map(range, reversed(sizes)))]
    if len(wide) == 2:
        first, second = wide
        places = []
        for a, b in [(0, 0), *_open_ring(sizes[first], sizes[second])]:
            place = [0, 0, 0]
            place[first], place[second] = a, b
            places.append((place[0], place[1], place[2]))
        return places
    layers: list[Place] = [(0, 0, 0)]
    for z in range(z_size):
        layer = _open_ring(x_size, y_size)
        layers += [(x, y, z) for x, y in (layer if z % 2 == 0 else reversed(layer))]
    return layers + [(0, 0, z) for z in range(z_size - 1, 0, -1)]


def _open_ring(x_size: int, y_size: int) -> list[tuple[int, int]]:
    """Returns a ring through a rectangle without its first place. It goes to and fro over the rows and back along the
    first column.
    """
    places = []
    for y in range(y_size):
        row = range(1, x_size)
        places += [(x, y) for x in (row if y % 2 == 0 else reversed(row))]
    return places + [(0, y) for y in range(y_size - 1, 0, -1)]

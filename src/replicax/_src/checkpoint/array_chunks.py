"""How arrays are cut into chunks and files, and which process writes which file. Pure: no jax, no I/O.

A chunk is what is read and verified at once. A file has whole chunks, all of one device's block. Chunks divide blocks
evenly, so no two processes write one file. The processes take turns at blocks that several of them hold: all compute
the same turns, without a message.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

CHUNK_BYTES = 4 << 20
FILE_BYTES = 32 << 20
SLAB_BYTES = 32 << 20
_LARGEST_DIVISOR = 64  # thinner chunks are worse than larger ones
_EVEN_DIVISOR = 7  # a dim that no device divides is rather halved unevenly than divided by a larger number

Shape = tuple[int, ...]


def chunk_shapes(
    shape: Sequence[int], block: Sequence[int], item_bytes: int, *, only_rows: bool = False
) -> tuple[Shape, Shape]:
    """Returns the shapes of a chunk and of a file.

    The dims that are divided among devices are cut first, then the others, in turn. If only one dim were cut, another
    sharding would read up to 3.5 times of what it needs.

    Args:
      shape: The shape of the array.
      block: The shape of a device's part of it, which divides it evenly.
      item_bytes: The size of an element.
      only_rows: True to cut only the first dim, for a table that is read in blocks of rows.
    """
    sizes = [max(1, size) for size in block]
    is_divided = [part < size for part, size in zip(block, shape, strict=True)]
    dims = sorted(range(len(sizes)), key=lambda dim: not is_divided[dim])
    cuts: list[tuple[int, int]] = []
    waiting = dims[:1] if only_rows else dims
    while waiting and math.prod(sizes) * item_bytes > CHUNK_BYTES:
        cut_now = [(dim, _divisor(sizes[dim], is_even=is_divided[dim])) for dim in waiting]
        waiting = [dim for dim, divisor in cut_now if divisor > 1]
        for dim, divisor in cut_now:
            if divisor > 1 and math.prod(sizes) * item_bytes > CHUNK_BYTES:
                sizes[dim] = -(-sizes[dim] // divisor)
                cuts.append((dim, divisor))
    chunk = tuple(sizes)
    file_bytes = FILE_BYTES // 4 if only_rows else FILE_BYTES
    for dim, divisor in reversed(cuts):
        if math.prod(sizes) * divisor * item_bytes > file_bytes:
            break
        sizes[dim] *= divisor
    return chunk, tuple(sizes)


def _divisor(size: int, *, is_even: bool) -> int:
    """Returns the number of parts in which a dim is cut; 1 if it is not cut."""
    largest = _LARGEST_DIVISOR if is_even else _EVEN_DIVISOR
    smallest = next((n for n in range(2, largest + 1) if size % n == 0), 0)
    return smallest or (1 if is_even or size == 1 else 2)


def grid_of(shape: Sequence[int], step: Sequence[int]) -> Shape:
    """Returns the number of files in each dim."""
    return tuple(-(-size // by) for size, by in zip(shape, step, strict=True))


def origins(shape: Sequence[int], step: Sequence[int]) -> Iterator[Shape]:
    """Yields where each file begins, in C order. It needs no memory, however many there are."""
    return _within([range(0, size, by) for size, by in zip(shape, step, strict=True)])


def origins_in(index: Sequence[slice], step: Sequence[int]) -> Iterator[Shape]:
    """Yields where each file begins that has something of an index with bounds."""
    return _within(
        [
            range(part.start - part.start % by, part.stop if part.start < part.stop else 0, by)
            for part, by in zip(index, step, strict=True)
        ]
    )


def _within(ranges: Sequence[range]) -> Iterator[Shape]:
    if not ranges:
        yield ()
        return
    for first in ranges[0]:
        for rest in _within(ranges[1:]):
            yield first, *rest


def position_of(origin: Sequence[int], step: Sequence[int], shape: Sequence[int]) -> int:
    """Returns the position in C order of the file that begins at ``origin``."""
    position = 0
    for at, by, count in zip(origin, step, grid_of(shape, step), strict=True):
        position = position * count + at // by
    return position


def part_at(origin: Sequence[int], step: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    """Returns the index of the file, or chunk, that begins at ``origin``."""
    return tuple(slice(at, min(at + by, size)) for at, by, size in zip(origin, step, shape, strict=True))


def slabs(
    shape: Shape, item_bytes: int, chunk_rows: int = 1, max_bytes: int | None = None
) -> Iterator[tuple[slice, ...]]:
    """Yields the indices of parts of an array, in the order of its bytes: full rows of chunks, if these fit.

    Args:
      shape: The shape of the array.
      item_bytes: The size of an element.
      chunk_rows: The number of rows that are read together.
      max_bytes: The largest size of a part; by default 32 MiB.
    """
    if not shape:
        yield ()
        return
    rows = (max_bytes or SLAB_BYTES) // max(1, math.prod(shape[1:]) * item_bytes)
    rows -= rows % chunk_rows if rows > chunk_rows else 0
    for start in range(0, shape[0], max(1, rows)):
        part = slice(start, min(start + max(1, rows), shape[0]))
        for rest in ((),) if rows else slabs(shape[1:], item_bytes, max_bytes=max_bytes):
            yield part, *rest


@final
@dataclass(frozen=True)
class Cut:
    """An array, cut into files.

    Attributes:
      shape: The shape of the array.
      item_bytes: The size of an element.
      block: The shape of a device's part.
      holders: The numbers of the processes that hold each block, by where it begins; empty if only process 0 has the
        array.
      chunk, file: The shapes of a chunk and of a file.
    """

    shape: Shape
    item_bytes: int
    block: Shape
    holders: Mapping[Shape, tuple[int, ...]]
    chunk: Shape
    file: Shape

    @property
    def files(self) -> Iterator[Shape]:
        """Yields where each file begins."""
        return origins(self.shape, self.file)

    def block_of(self, origin: Shape) -> Shape:
        """Returns where the block begins that has a file."""
        return tuple(at - at % max(1, size) for at, size in zip(origin, self.block, strict=True))

    def held_by(self, process: int) -> tuple[int, ...]:
        """Returns the process for each file that it holds, in C order, and another holder for each other file."""
        held = [self.holders.get(self.block_of(origin), (process,)) for origin in self.files]
        return tuple(process if process in holders else holders[0] for holders in held)

    def bytes_of(self, origin: Shape) -> int:
        """Returns the size of the file that begins at ``origin``."""
        index = part_at(origin, self.file, self.shape)
        return math.prod(part.stop - part.start for part in index) * self.item_bytes


def writers_of(cuts: Mapping[str, Cut]) -> dict[str, tuple[int, ...]]:
    """Returns the number of the process that writes each file, by key, in C order; one number if all are equal.

    If several processes hold a file, the process with the fewest bytes so far writes it.
    """
    num_bytes: dict[int, int] = {}
    writers: dict[str, list[int]] = {}
    shared: list[tuple[str, int, tuple[int, ...], int]] = []
    for key in sorted(cuts):
        cut, found = cuts[key], writers.setdefault(key, [])
        for number, origin in enumerate(cut.files):
            holders = cut.holders[cut.block_of(origin)] if cut.holders else (0,)
            first = min(holders)
            found.append(first)
            if len(holders) > 1:
                shared.append((key, number, holders, cut.bytes_of(origin)))
            else:
                num_bytes[first] = num_bytes.get(first, 0) + cut.bytes_of(origin)
    for key, number, holders, size in sorted(shared, key=lambda one: -one[3]):
        writer = min(holders, key=lambda process: (num_bytes.get(process, 0), process))
        writers[key][number] = writer
        num_bytes[writer] = num_bytes.get(writer, 0) + size
    return {key: tuple(found[:1] if len({*found}) < 2 else found) for key, found in writers.items()}

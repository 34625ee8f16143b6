"""Chunks: adjacent elements of a dataset, as a list or as row numbers of arrays, and how chunks are joined."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, final

import jax
import numpy as np

from replicax._src.devices import memory
from replicax._src.input.arrays import batch_of_rows

Functions = tuple[Callable[..., Any], ...]


@final
class ArrayRows:
    """Rows of arrays, by number. They are read and mapped only when they are needed.

    So a shuffle permutes numbers, and no Python runs per row. Adjacent rows are a ``range`` and are read as a slice. As
    a chunk it stands for its rows. As an element of a list it stands for one batch of these rows.

    Args:
      arrays: The arrays ``[n, ...]``, which are the leaves of a pytree.
      tree: The structure of the pytree.
      numbers: The row numbers.
      row_functions: The functions to call with each row, in order.
      batch_functions: The functions to call with the batch.
    """

    __slots__ = ("arrays", "batch_functions", "numbers", "row_functions", "tree")

    def __init__(
        self,
        arrays: Sequence[Any],
        tree: Any,
        numbers: range | np.ndarray,
        row_functions: Functions = (),
        batch_functions: Functions = (),
    ):
        self.arrays, self.tree, self.numbers = arrays, tree, numbers
        self.row_functions, self.batch_functions = row_functions, batch_functions

    @classmethod
    def all_of(cls, pytree: Any, row_functions: Functions = ()) -> ArrayRows:
        """Returns all rows of a pytree of arrays."""
        arrays, tree = jax.tree.flatten(pytree)
        return cls(arrays, tree, range(len(arrays[0])), row_functions)

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, places: slice | np.ndarray) -> ArrayRows:
        """Returns some of the rows."""
        numbers = self.numbers
        if isinstance(places, slice):
            numbers = numbers[places]
        elif isinstance(numbers, range):
            numbers = numbers.start + numbers.step * places  # NumPy would read a range one by one
        else:
            numbers = numbers[places]
        return ArrayRows(self.arrays, self.tree, numbers, self.row_functions)

    def mapped(self, function: Callable[..., Any]) -> ArrayRows:
        """Returns the batch of these rows with one more function to call."""
        return ArrayRows(
            self.arrays, self.tree, self.numbers, self.row_functions, (*self.batch_functions, function)
        )

    def rows(self) -> Iterator[Any]:
        """Yields the rows one by one."""
        for number in self.numbers:
            yield _called(self.row_functions, self.tree.unflatten([array[number] for array in self.arrays]))

    def batch(self) -> Any:
        """Returns all rows as one batch: views for adjacent rows, otherwise copies."""
        numbers = self.numbers
        if self.row_functions:
            batch = batch_of_rows(list(self.rows()))
        elif isinstance(numbers, range):
            rows = slice(numbers.start, numbers.stop, numbers.step)
            batch = self.tree.unflatten([array[rows] for array in self.arrays])
        else:
            batch = self.tree.unflatten([memory.take(array, numbers) for array in self.arrays])
        return _called(self.batch_functions, batch)


Chunk = list[Any] | ArrayRows
"""No element at all may be an empty list in both cases."""


def elements_of(chunk: Chunk) -> list[Any]:
    """Returns the elements of a chunk, read and mapped."""
    if isinstance(chunk, ArrayRows):
        return list(chunk.rows())
    return [element.batch() if type(element) is ArrayRows else element for element in chunk]


def mapped(chunk: Chunk, function: Callable[..., Any]) -> Chunk:
    """Returns a chunk of mapped elements. For arrays the function is called when the elements are read."""
    if isinstance(chunk, ArrayRows):
        return ArrayRows(chunk.arrays, chunk.tree, chunk.numbers, (*chunk.row_functions, function))
    return [
        element.mapped(function) if type(element) is ArrayRows else call_with(function, element)
        for element in chunk
    ]


def chosen(chunk: Chunk, predicate: Callable[..., Any]) -> Chunk:
    """Returns the elements for which the predicate is true. Calls the functions of maps once for all of them."""
    elements = elements_of(chunk)
    places = [place for place, element in enumerate(elements) if call_with(predicate, element)]
    if isinstance(chunk, ArrayRows) and not chunk.row_functions:
        return chunk[np.asarray(places, np.intp)]
    return [elements[place] for place in places]


def permuted(chunk: Chunk, places: np.ndarray) -> Chunk:
    """Returns the elements at the given indices."""
    return chunk[places] if isinstance(chunk, ArrayRows) else [chunk[place] for place in places]


def join(chunks: Sequence[Chunk]) -> Chunk:
    """Joins chunks of one dataset in order. Only rows of different arrays are copied."""
    filled = [chunk for chunk in chunks if len(chunk)]
    if len(filled) <= 1:
        return filled[0] if filled else []
    rows = [chunk for chunk in filled if isinstance(chunk, ArrayRows)]
    if not rows:
        return [element for chunk in filled for element in chunk]  # type: ignore[union-attr]
    first, row_functions = rows[0], rows[0].row_functions
    if all(chunk.arrays is first.arrays for chunk in rows):
        numbers = np.concatenate([chunk.numbers for chunk in rows])
        return ArrayRows(first.arrays, first.tree, numbers, row_functions)
    batches = [ArrayRows(chunk.arrays, chunk.tree, chunk.numbers).batch() for chunk in rows]
    return ArrayRows.all_of(
        jax.tree.map(lambda *columns: memory.concatenate(columns), *batches), row_functions
    )


def read_pieces(num_rows: int, read: Callable[[int], Chunk | None]) -> Chunk:
    """Returns the next rows, in as few chunks as possible.

    Args:
      read: Returns at most the given number of rows, or None after the last.
    """
    piece = read(num_rows) if num_rows else None
    if piece is None or len(piece) == num_rows:
        return piece or []
    pieces: list[Chunk] = []
    while piece is not None:
        pieces.append(piece)
        num_rows -= len(piece)
        piece = read(num_rows) if num_rows else None
    return join(pieces)


def call_with(function: Callable[..., Any], element: Any) -> Any:
    """Returns the result of a ``map`` or ``filter`` function for an element. A tuple becomes its arguments, as in
    tf.data.
    """
    return function(*element) if type(element) is tuple else function(element)


def _called(functions: Functions, element: Any) -> Any:
    for function in functions:
        element = call_with(function, element)
    return element

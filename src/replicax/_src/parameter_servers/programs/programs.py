"""Programs of parameter servers and of workers, as data that the coordinator sends instead of code. Pure.

Both hold a computation as StableHLO (``jax.export``) and say what its operands and results are. The other
files of this folder make them; ``store/store_contents.py`` and ``worker/runner.py`` run them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from replicax._src.variables.server_arrays import Piece

Averaging = Literal["mean", "all", "rows"]
"""How operands of several closures become one: their mean; whether all of them hold; or, of numbers of rows and the
rows' gradients, which are two operands, the mean of these.
"""


@dataclass(frozen=True)
class NamedRows:
    """Rows of a piece whose numbers are in an operand of an update program. Numbers that are none of a row name none.

    Attributes:
      operand: Its position.
      start: The number that stands for the first row of the piece.
      are_indices: Along the last axis of the operand are indices, of which the first is the row's; else all are rows'.
    """

    operand: int
    start: int = 0
    are_indices: bool = False


@dataclass(frozen=True)
class UpdateProgram:
    """A program that a parameter server runs when a closure pushes to it: it computes new values of some of its pieces.

    The computation takes the values of ``state``, in order, then the operands; it gives the new values of those of
    ``written``, in order. These it may overwrite.

    Attributes:
      blob: The computation: ``jax.export.Exported.serialize()``.
      state: Keys of pieces.
      written: Positions in ``state``.
      averaged: The averaging of each operand, for an update by the mean of several closures' gradients.
      rows: For each of ``written`` the rows that may have another value afterwards; None: any. Empty: any of all.
      digest: A hash of all of it; programs that are equal have equal ones.
    """

    blob: bytes
    state: tuple[str, ...]
    written: tuple[int, ...]
    averaged: tuple[Averaging, ...] = ()
    rows: tuple[tuple[NamedRows, ...] | None, ...] = ()

    @property
    def digest(self) -> str:
        return _digest(self)

    def described(self) -> dict[str, Any]:
        """All but the blob, for a header."""
        fields = dataclasses.asdict(self)
        del fields["blob"]
        return fields

    @classmethod
    def of(cls, described: Mapping[str, Any], blob: bytes) -> Self:
        """The program that ``described`` and ``blob`` came from."""
        rows = tuple(
            None if named is None else tuple(NamedRows(**each) for each in named)
            for named in described["rows"]
        )
        fields = {name: tuple(described[name]) for name in ("state", "written", "averaged")}
        return cls(blob, **fields, rows=rows)


@dataclass(frozen=True)
class Input:
    """One operand of a worker's computation.

    Attributes:
      kind: "constant": an array sent before, by ``name``. "variable": number ``index`` of the program's variables,
        whole. "argument": number ``index`` of the closure's arrays. "element": leaf ``leaf`` of what the ``call``-th
        ``next`` of iterator number ``index`` gives. "rows": the rows of variable ``index`` at the unique ids of lookup
        ``call``. "positions": where in these each id of lookup ``call`` is.
    """

    kind: Literal["constant", "variable", "argument", "element", "rows", "positions"]
    index: int = 0
    call: int = 0
    leaf: int = 0
    name: str = ""


@dataclass(frozen=True)
class Operand:
    """One operand of a push: result ``result`` of the worker's computation, or its rows (start, stop).

    With ``lookup`` (its number) ``rows`` are those of a shard, and what is sent are the gradients of the unique ids
    that are in it, after these ids themselves, counted from ``start``: the update program takes both.
    """

    result: int
    rows: tuple[int, int] | None = None
    lookup: int | None = None


@dataclass(frozen=True)
class Push:
    """A message of a closure to one parameter server at its end: a program by its digest, and its operands.

    Attributes:
      is_averaged: The program is run for a round, with the mean of its closures' operands.
    """

    ps: int
    program: str
    operands: tuple[Operand, ...]
    is_averaged: bool = False


@dataclass(frozen=True)
class Lookup:
    """Rows of a variable that a worker's computation needs, and how it finds out which.

    Attributes:
      variable: Number of the table among the program's variables, of which only these rows travel.
      blob: A computation of the ids, of any shape, whose operands are ``inputs``.
      num_ids: How many ids that gives: the unique ones are padded to as many.
      num_rows: The number of rows of the table.
    """

    variable: int
    blob: bytes
    inputs: tuple[Input, ...]
    num_ids: int
    num_rows: int


@dataclass(frozen=True)
class WorkerProgram:
    """A program that a worker runs for a closure, with its inputs, and where it sends the results.

    Attributes:
      name: The name of the user's function, for people.
      blob: The computation: ``jax.export.Exported.serialize()``.
      inputs: Its operands, in order.
      variables: For each variable its pieces, in the order of their rows.
      num_results: How many of its first results the closure returns.
      pushes: What is made of the other results; at most one of each kind for each parameter server.
      lookups: The lookups in tables.
      element_counts: For each iterator how many elements are taken, before anything else is done: in a closure's first
        program. Another one uses so many of them; the others go back.
      num_replicas: Devices that the computation runs on.
    """

    name: str
    blob: bytes
    inputs: tuple[Input, ...]
    variables: tuple[tuple[Piece, ...], ...]
    num_results: int
    pushes: tuple[Push, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    element_counts: tuple[int, ...] = ()
    num_replicas: int = 1

    @property
    def digest(self) -> str:
        return _digest(self)

    def described(self) -> dict[str, Any]:
        """All but the blobs, for a header."""
        fields = dataclasses.asdict(self)
        del fields["blob"]
        for lookup in fields["lookups"]:
            del lookup["blob"]
        return fields

    @property
    def blobs(self) -> list[bytes]:
        """The computation, then those of the lookups."""
        return [self.blob, *(lookup.blob for lookup in self.lookups)]

    @classmethod
    def of(cls, described: Mapping[str, Any], blobs: Sequence[bytes]) -> Self:
        """The program that ``described`` and ``blobs`` came from."""
        blob, *of_lookups = blobs
        return cls(
            described["name"],
            blob,
            _inputs(described["inputs"]),
            tuple(tuple(_piece(p) for p in pieces) for pieces in described["variables"]),
            described["num_results"],
            tuple(
                Push(p["ps"], p["program"], tuple(_operand(o) for o in p["operands"]), p["is_averaged"])
                for p in described["pushes"]
            ),
            tuple(
                Lookup(x["variable"], b, _inputs(x["inputs"]), x["num_ids"], x["num_rows"])
                for x, b in zip(described["lookups"], of_lookups, strict=True)
            ),
            tuple(described["element_counts"]),
            described["num_replicas"],
        )


def signature_of(elements: Sequence[Sequence[tuple[Sequence[int], Any]] | None]) -> str:
    """Returns a text that distinguishes elements that need different computations: shapes and dtypes of their leaves.

    Args:
      elements: In order, each with its leaves; None for one that is missing, because its dataset has ended.
    """
    return json.dumps(
        [
            None if leaves is None else [[list(shape), str(dtype)] for shape, dtype in leaves]
            for leaves in elements
        ]
    )


def _inputs(described: Sequence[Mapping[str, Any]]) -> tuple[Input, ...]:
    return tuple(Input(**fields) for fields in described)


def _piece(fields: Mapping[str, Any]) -> Piece:
    return Piece(fields["ps"], fields["key"], _pair(fields["rows"]))


def _operand(fields: Mapping[str, Any]) -> Operand:
    return Operand(fields["result"], _pair(fields["rows"]), fields["lookup"])


def _pair(value: Sequence[int] | None) -> tuple[int, int] | None:
    return None if value is None else (value[0], value[1])


def _digest(program: UpdateProgram | WorkerProgram) -> str:
    blobs = program.blobs if isinstance(program, WorkerProgram) else [program.blob]
    said = hashlib.blake2b(json.dumps(program.described(), sort_keys=True).encode(), digest_size=16)
    for blob in blobs:
        said.update(len(blob).to_bytes(8, "little"))
        said.update(blob)
    return said.hexdigest()

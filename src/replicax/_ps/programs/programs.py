"""Programs of parameter servers and of workers, as data that the coordinator sends instead of code. Pure.

Both have a computation as StableHLO (``jax.export``) and a description of its operands and results. The other files
of
this folder make them; ``store/store_contents.py`` and ``worker/runner.py`` run them.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self

from replicax._ps.placement.server_arrays import Shard

Averaging = Literal["mean", "all", "rows"]
"""The way to combine operands of several closures. "mean" takes the mean. "all" is true if all are. "rows" takes the
mean
of gradients of rows; it needs two operands, the row numbers and the gradients.
"""


@dataclass(frozen=True)
class NamedRows:
    """Rows of a shard whose numbers are in an operand of an update program. Numbers outside of the shard name no row.

    Attributes:
      operand: The position of the operand.
      start: The number that stands for the first row of the shard.
      are_indices: True if the operand's last axis has indices, of which the first is the row number; False if all its
        values are row numbers.
    """

    operand: int
    start: int = 0
    are_indices: bool = False


@dataclass(frozen=True)
class UpdateProgram:
    """A program that a parameter server runs when a closure pushes to it: it computes new values of some of its
    shards.

    The computation takes the values of ``state``, in order, then the operands. It returns the new values of those of
    ``written``, in order, and may overwrite the old ones.

    Attributes:
      blob: The computation: ``jax.export.Exported.serialize()``.
      state: The keys of the shards that it reads.
      written: Positions in ``state``.
      averaged: The averaging of each operand, for an update by the mean of several closures' gradients.
      rows: For each of ``written`` the rows that may change; None if any may. Empty if any row of all may.
      digest: A hash of the program. Equal programs have equal hashes.
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
        """Returns everything but the blob, for a header."""
        fields = dataclasses.asdict(self)
        del fields["blob"]
        return fields

    @classmethod
    def of(cls, described: Mapping[str, Any], blob: bytes) -> Self:
        """Makes the program that ``described`` and ``blob`` came from."""
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
      kind: "constant": an array sent before, by ``name``. "variable": number ``index`` of the program's variables, in
        full. "argument": number ``index`` of the closure's arrays. "element": leaf ``leaf`` of the element that the
        ``call``-th ``next`` of iterator number ``index`` returns. "rows": the rows of variable ``index`` at the
        unique ids
        of lookup ``call``. "positions": the position of each id of lookup ``call`` among these.
    """

    kind: Literal["constant", "variable", "argument", "element", "rows", "positions"]
    index: int = 0
    call: int = 0
    leaf: int = 0
    name: str = ""


@dataclass(frozen=True)
class Operand:
    """One operand of a push: result ``result`` of the worker's computation, or its rows (start, stop).

    With ``lookup`` (its number) ``rows`` are those of a shard. Two operands are sent: the unique ids in the shard,
    counted
    from ``start``, and their gradients.
    """

    result: int
    rows: tuple[int, int] | None = None
    lookup: int | None = None


@dataclass(frozen=True)
class Push:
    """A message of a closure to one parameter server at its end: a program by its digest, and its operands.

    Attributes:
      is_averaged: True if the program runs once for a round, with the mean of its closures' operands.
    """

    ps: int
    program: str
    operands: tuple[Operand, ...]
    is_averaged: bool = False


@dataclass(frozen=True)
class Lookup:
    """Rows of a variable that a worker's computation needs, and the computation of their ids.

    Attributes:
      variable: The number of the table among the program's variables, of which only these rows are sent.
      blob: A computation of the ids, of any shape, whose operands are ``inputs``.
      num_ids: The number of ids that it returns. The unique ids are padded to this number.
      num_rows: The number of rows of the table.
    """

    variable: int
    blob: bytes
    inputs: tuple[Input, ...]
    num_ids: int
    num_rows: int


@dataclass(frozen=True)
class WorkerProgram:
    """A program that a worker runs for a closure, with its inputs and the destinations of its results.

    Attributes:
      name: The name of the user's function, for messages.
      blob: The computation: ``jax.export.Exported.serialize()``.
      inputs: Its operands, in order.
      variables: The shards of each variable, in the order of their rows.
      num_results: The number of leading results that the closure returns.
      pushes: The messages made of the other results, at most one of each kind for each parameter server.
      lookups: The lookups in tables.
      element_counts: The number of elements taken from each iterator at the start of the closure's first program.
        Another
        program of the closure uses that many of them; the rest are put back.
      num_replicas: The number of devices that the computation runs on.
    """

    name: str
    blob: bytes
    inputs: tuple[Input, ...]
    variables: tuple[tuple[Shard, ...], ...]
    num_results: int
    pushes: tuple[Push, ...] = ()
    lookups: tuple[Lookup, ...] = ()
    element_counts: tuple[int, ...] = ()
    num_replicas: int = 1

    @property
    def digest(self) -> str:
        return _digest(self)

    def described(self) -> dict[str, Any]:
        """Returns everything but the blobs, for a header."""
        fields = dataclasses.asdict(self)
        del fields["blob"]
        for lookup in fields["lookups"]:
            del lookup["blob"]
        return fields

    @property
    def blobs(self) -> list[bytes]:
        """The blob of the computation, then those of the lookups."""
        return [self.blob, *(lookup.blob for lookup in self.lookups)]

    @classmethod
    def of(cls, described: Mapping[str, Any], blobs: Sequence[bytes]) -> Self:
        """Makes the program that ``described`` and ``blobs`` came from."""
        blob, *of_lookups = blobs
        return cls(
            described["name"],
            blob,
            _inputs(described["inputs"]),
            tuple(tuple(_shard(p) for p in shards) for shards in described["variables"]),
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
    """Returns a text that differs for elements that need different computations: the shapes and dtypes of their
    leaves.

    Args:
      elements: The elements in order, each with its leaves; None for one that is missing, because its dataset has
        ended.
    """
    return json.dumps(
        [
            None if leaves is None else [[list(shape), str(dtype)] for shape, dtype in leaves]
            for leaves in elements
        ]
    )


def _inputs(described: Sequence[Mapping[str, Any]]) -> tuple[Input, ...]:
    return tuple(Input(**fields) for fields in described)


def _shard(fields: Mapping[str, Any]) -> Shard:
    return Shard(fields["ps"], fields["key"], _pair(fields["rows"]))


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

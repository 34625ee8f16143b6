"""One step of a parameter server, from its client's side: the request and the answer. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from replicax._ps.client.row_requests import RowsWanted, padded
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import InvalidArgumentError

Closure = tuple[Any, int]
"""The session id of its coordinator, and its number."""
Version = tuple[Any, int]
"""The instance of the server, and a number."""


@dataclass(frozen=True)
class Ask:
    """One server's part of a step: it applies a program, then reads.

    Attributes:
      program: The program's digest.
      operands: The program's operands.
      pull: The keys of shards, each with the version that the client has, or None.
      rows: The keys of shards, each with the numbers of the rows to read (int32, counted from the shard's first row).
      used: The keys of shards, with the versions that the operands were computed from, for the measure of staleness.
      gradients: The digest of a round's program, and this closure's operands; None outside of rounds.
    """

    program: str | None = None
    operands: Sequence[np.ndarray] = ()
    pull: Sequence[tuple[str, Version | None]] = ()
    rows: Sequence[tuple[str, np.ndarray]] = ()
    used: Sequence[tuple[str, Version]] = ()
    gradients: tuple[str, Sequence[np.ndarray]] | None = None


@dataclass(frozen=True)
class Answered:
    """The answer to an ``Ask``.

    Arrays that came over the transport stay valid for as long as they exist. A store of this process may change its
    own
    with the next message.

    Attributes:
      values: By the key of each shard that was pulled: its version, and its value, or None if the known one is
        current.
      rows: The rows, in the order of the request.
      is_duplicate: True if the closure had been applied before, and was not applied again.
    """

    values: Mapping[str, tuple[Version, np.ndarray | None]]
    rows: Sequence[np.ndarray]
    is_duplicate: bool


def request_of(ask: Ask, closure: Closure | None, low: int, round_number: int | None) -> Message:
    """Returns the request for one server's part of a step; see ``ServerClients.step``."""
    header = {
        "op": "step",
        "closure": None if closure is None else list(closure),
        "low": low,
        "program": ask.program,
        "pull": [[key, version] for key, version in ask.pull],
        "rows": [key for key, _ in ask.rows],
        "used": list(ask.used),
    }
    operands = ask.operands
    if ask.gradients is not None:
        digest, gradients = ask.gradients
        header["gradients"] = {"round": round_number, "program": digest, "operands": len(gradients)}
        operands = [*operands, *gradients]
    return Message(header, [*operands, *(numbers for _, numbers in ask.rows)])


def answered_of(ask: Ask, answer: Message) -> Answered:
    """Reads the answer to ``ask``."""
    versions = [(instance, number) for instance, number in answer.header["versions"]]
    arrays = iter(answer.arrays)
    values = {
        key: (version, None if known is not None and tuple(known) == version else next(arrays))
        for (key, known), version in zip(ask.pull, versions, strict=True)
    }
    rows = list(arrays)
    if len(rows) != len(ask.rows):
        raise InvalidArgumentError(f"Rows of {len(ask.rows)} shards were requested, but {len(rows)} came.")
    return Answered(values, rows, bool(answer.header["duplicate"]))


def row_asks(tables: Sequence[RowsWanted]) -> dict[int, Ask]:
    """Returns each server's part of a step that reads the rows of several lookups."""
    rows: dict[int, list[tuple[str, np.ndarray]]] = {}
    for wanted in tables:
        for ps, key, numbers in wanted.parts:
            rows.setdefault(ps, []).append((key, numbers))
    return {ps: Ask(rows=ours) for ps, ours in rows.items()}


def rows_of(tables: Sequence[RowsWanted], answers: Mapping[int, Answered]) -> list[np.ndarray]:
    """Reads the answers to ``row_asks``. Returns for each lookup the rows of its unique ids, padded."""
    rows = {ps: iter(answer.rows) for ps, answer in answers.items()}
    return [padded([next(rows[ps]) for ps, _, _ in wanted.parts], wanted.num_ids) for wanted in tables]

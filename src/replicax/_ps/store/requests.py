"""Requests to a parameter server, read from the headers of messages.

Peers are authenticated and have the same version. So a malformed request is a bug in this library, and
``Store.answer``
says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store.acceptance_rules import Closure, Version
from replicax._ps.store.held_values import Spec
from replicax._src.program_kit.errors import InvalidArgumentError, MessageError

KnownVersions = Sequence[tuple[str, Version | None]]
"""Keys of shards, each with the version that the client has."""


@dataclass(frozen=True)
class NewShard:
    """A shard to be created.

    Attributes:
      key: The name of the shard.
      spec: The shape and dtype.
      initial: "array", or the digest of the program that computes the value.
      value: The value, or None.
    """

    key: str
    spec: Spec
    initial: str
    value: np.ndarray | None


@dataclass(frozen=True)
class Create:
    """A request to create shards.

    Attributes:
      shards: The shards.
      if_absent: True to leave existing shards as they are.
      number: The number of the call; None for a call that cannot be repeated.
      low: All calls of that client with lower numbers have ended.
    """

    shards: Sequence[NewShard]
    if_absent: bool
    number: Closure | None
    low: int

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Reads a message."""
        values = iter(arrays)
        shards = [_new_shard(described, values) for described in header["shards"]]
        return cls(shards, bool(header.get("if_absent")), *_once(header))


@dataclass(frozen=True)
class Gradients:
    """The gradients of a closure for a round.

    Attributes:
      round_number: The number of the round.
      program: The digest of the update that all closures of the round use.
      operands: The gradients.
    """

    round_number: int
    program: str
    operands: Sequence[np.ndarray]


@dataclass(frozen=True)
class ApplyRound:
    """A request to apply a round.

    Attributes:
      number: The number of the round, and its coordinator.
      low: All rounds of that coordinator with lower numbers are over.
      closures: The numbers of the closures whose gradients are averaged.
    """

    number: Closure
    low: int
    closures: Sequence[int]

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Reads a message."""
        return cls(Closure(*header["round"]).round_closure, header.get("low") or 0, header["closures"])


@dataclass(frozen=True)
class Assign:
    """A request to assign values to shards.

    Attributes:
      number: The number of the call; None for a call that cannot be repeated.
      low: All calls of that client with lower numbers have ended.
    """

    keys: Sequence[str]
    values: Sequence[np.ndarray]
    number: Closure | None
    low: int

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Reads a message."""
        return cls(header["keys"], arrays, *_once(header))


@dataclass(frozen=True)
class Step:
    """A request that updates shards and reads shards, as one operation.

    Attributes:
      closure: The closure that pushes; None for a push that cannot be repeated.
      low: All closures of its coordinator with lower numbers have ended.
      program: The digest of the update; None for a read.
      pull: The shards to read.
      rows: The keys of the shards of which rows are read.
      used: The versions that the closure computed with; by default those of ``pull``.
      gradients: The gradients of the closure for a round.
      only_apply: True if nothing is read, as on a backup.
    """

    closure: Closure | None
    low: int
    program: str | None
    pull: KnownVersions
    rows: Sequence[str]
    used: KnownVersions
    operands: Sequence[np.ndarray]
    row_numbers: Sequence[np.ndarray]
    gradients: Gradients | None
    only_apply: bool

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Reads a message. Its arrays are the operands, the gradients, and row numbers for each of ``rows``, in
        this order.
        """
        rows, program, given = header.get("rows") or (), header.get("program"), header.get("gradients")
        stop = len(arrays) - len(rows)
        num_operands = stop if given is None else stop - given["operands"]
        if num_operands < 0 or (program is None and num_operands):
            raise MessageError(
                f"The header of a step does not account for its {len(arrays)} arrays: {header!r:.200}."
            )
        gradients = (
            None if given is None else Gradients(given["round"], given["program"], arrays[num_operands:stop])
        )
        pull, used = _versions(header.get("pull") or ()), header.get("used")
        closure = None if header.get("closure") is None else Closure(*header["closure"])
        return cls(
            closure,
            header.get("low") or 0,
            program,
            pull,
            rows,
            pull if used is None else _versions(used),
            arrays[:num_operands],
            arrays[stop:],
            gradients,
            bool(header.get("only_apply")),
        )


def program_of(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> UpdateProgram:
    """Reads the program in a message."""
    program = UpdateProgram.of(header["described"], arrays[0].tobytes())
    if program.digest != header["digest"]:
        raise InvalidArgumentError(
            f"The program sent as {header['digest']} has the digest {program.digest}. Send it with its own digest."
        )
    return program


@dataclass(frozen=True)
class Drop:
    """A request to drop shards and programs that are no longer needed.

    Attributes:
      keys: The keys of the shards.
      programs: The digests of the programs.
      number: The number of the call; None for a call that has no number.
      low: All calls of that client with lower numbers have ended.
    """

    keys: Sequence[str]
    programs: Sequence[str]
    number: Closure | None
    low: int

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """Reads a message."""
        return cls(header["keys"], header.get("programs") or (), *_once(header))


def keys_of(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Sequence[str]:
    """Reads the keys of shards."""
    return header["keys"]


def _new_shard(described: Mapping[str, Any], values: Iterator[np.ndarray]) -> NewShard:
    spec = tuple(described["shape"]), np.dtype(jnp.dtype(described["dtype"]))
    value = next(values) if described["initial"] == "array" else None
    return NewShard(described["key"], spec, described["initial"], value)


def _once(header: Mapping[str, Any]) -> tuple[Closure | None, int]:
    number = header.get("number")
    return None if number is None else Closure(*number), header.get("low") or 0


def _versions(pairs: Sequence[Any]) -> KnownVersions:
    return [(key, None if version is None else (version[0], version[1])) for key, version in pairs]

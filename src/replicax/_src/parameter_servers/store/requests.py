"""What is asked of a parameter server, read from headers. What is not as it has to be is a MessageError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import jax.numpy as jnp
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.errors import MessageError
from replicax._src.parameter_servers.programs.programs import UpdateProgram
from replicax._src.parameter_servers.store.held_values import Spec

Version = tuple[str, int]
_PAIRS = (list, tuple)


@dataclass(frozen=True)
class Closure:
    """A closure: its number, and whose. Or a round, of which it is ``of_rounds``, or another call that is done once."""

    incarnation: str
    number: int

    @property
    def of_rounds(self) -> Closure:
        """By what rounds of the same coordinator are known."""
        return Closure(f"{self.incarnation} rounds", self.number)


@dataclass(frozen=True)
class NewPiece:
    """A piece to be made.

    Attributes:
      key: Its name.
      spec: Shape and dtype.
      initial: "array", or the digest of the program that makes the value.
      value: The value, or None.
    """

    key: str
    spec: Spec
    initial: str
    value: np.ndarray | None


@dataclass(frozen=True)
class Gradients:
    """What a closure has for a round.

    Attributes:
      round_number: Of the round.
      program: Digest of the update that all of the round make.
    """

    round_number: int
    program: str
    operands: Sequence[np.ndarray]


@dataclass(frozen=True)
class ApplyRound:
    """A round that is to be applied.

    Attributes:
      number: Whose, and which.
      low: All its rounds below are over.
      closures: Whose gradients are averaged.
    """

    number: Closure
    low: int
    closures: list[int]

    @classmethod
    def of(cls, header: Mapping[str, Any]) -> Self:
        """The round that a message asks for."""
        closures = field_of(header, "closures", list)
        number = _closure(header, "round")
        if number is None or not all(type(each) is int for each in closures):
            raise MessageError(
                f"A round has a number and the numbers of closures, got {number!r:.100} and {closures!r:.100}."
            )
        return cls(number.of_rounds, field_of(header, "low", int, None) or 0, closures)


@dataclass(frozen=True)
class Assign:
    """Values that pieces are to have.

    Attributes:
      number: Whose, and which; None: not one that could come twice.
      low: All that client's below have ended.
    """

    keys: list[str]
    values: Sequence[np.ndarray]
    number: Closure | None
    low: int

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """What a message asks for."""
        keys = keys_of(header, "keys")
        if len(keys) != len(arrays) or len(set(keys)) != len(keys):
            raise InvalidArgumentError(
                f"Keys {keys} and {len(arrays)} values were to be assigned. Give one value for each key, and each key once."
            )
        return cls(keys, arrays, *once_of(header))


@dataclass(frozen=True)
class Step:
    """An update and a reading, as one.

    Attributes:
      closure: That pushes; None: not one that could come twice.
      low: All its closures below have ended.
      program: Digest; None: only reading.
      pull: Keys, and the versions that are known.
      rows: Keys of pieces of which rows are read.
      used: Keys, and the versions that the closure has computed with; if not said, those of ``pull``.
      gradients: That the closure has for a round.
    """

    closure: Closure | None
    low: int
    program: str | None
    pull: list[tuple[str, Version | None]]
    rows: list[str]
    used: list[tuple[str, Version | None]]
    operands: Sequence[np.ndarray]
    row_numbers: Sequence[np.ndarray]
    gradients: Gradients | None = None

    @classmethod
    def of(cls, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> Self:
        """The step that a message asks for."""
        rows = keys_of(header, "rows", [])
        num_operands = len(arrays) - len(rows)
        operands, row_numbers = arrays[: max(0, num_operands)], arrays[max(0, num_operands) :]
        gradients = _gradients(header, operands)
        if gradients is not None:
            num_operands -= len(gradients.operands)
            operands = operands[:num_operands]
        program = field_of(header, "program", str, None)
        if num_operands < 0 or (program is None and num_operands > 0):
            raise MessageError(
                f"A step with {len(arrays)} arrays reads rows of {len(rows)} pieces and has "
                f"{'no' if program is None else 'a'} program. Send its operands, then row numbers for each of `rows`."
            )
        for numbers in row_numbers:
            if numbers.dtype != np.int32 or numbers.ndim != 1:
                raise InvalidArgumentError(
                    f"Row numbers are int32[n], got {numbers.dtype.name}{list(numbers.shape)}."
                )
        pull = _known_versions(header, "pull")
        used = _known_versions(header, "used") if header.get("used") is not None else pull
        low = field_of(header, "low", int, None) or 0
        closure = _closure(header, "closure")
        if gradients is not None and closure is None:
            raise MessageError("Gradients of a round come from a closure, and there is none in the header.")
        return cls(closure, low, program, pull, rows, used, operands, row_numbers, gradients)


def new_pieces(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> list[NewPiece]:
    """The pieces that a message asks for, with their values in order."""
    described = field_of(header, "pieces", list)
    given = list(reversed(arrays))
    num_given = sum(field_of(piece, "initial", str) == "array" for piece in described)
    if num_given != len(arrays):
        raise MessageError(
            f"{num_given} pieces are to be made of arrays, and {len(arrays)} came. Send one for each, in order."
        )
    pieces = [_new_piece(piece, given) for piece in described]
    if len({piece.key for piece in pieces}) != len(pieces):
        raise InvalidArgumentError(
            f"Pieces {[piece.key for piece in pieces]} repeat. Give each a key of its own."
        )
    return pieces


def program_of(header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> UpdateProgram:
    """The program that a message brings."""
    described, digest = header.get("described"), field_of(header, "digest", str)
    match described:
        case {"state": [*state], "written": [*written]} if len(arrays) == 1:
            averaged = described.get("averaged", [])
        case _:
            raise MessageError(
                f'A program has "described", of "state" and "written", and one array; got {described!r:.100} and '
                f"{len(arrays)} arrays."
            )
    if not all(isinstance(key, str) for key in state) or not all(type(at) is int for at in written):
        raise MessageError(
            f"A program's state is keys, and written positions in these; got {described!r:.100}."
        )
    if not isinstance(averaged, list) or not all(kind in ("mean", "all", "rows") for kind in averaged):
        raise MessageError(f'Operands are averaged as "mean", "all" or "rows"; got {averaged!r:.100}.')
    program = UpdateProgram.of(described, arrays[0].tobytes())
    if program.digest != digest:
        raise InvalidArgumentError(
            f"The program that was sent as {digest} is {program.digest}. Send it with its own digest."
        )
    return program


def field_of(header: Any, name: str, kind: Any, *default: Any) -> Any:
    """A field of a header, of the right type. A default, if there is one, is for a field that is null or absent."""
    value = header.get(name) if isinstance(header, Mapping) else None
    if value is None and default:
        return default[0]
    if not isinstance(value, kind) or isinstance(value, bool):
        raise MessageError(f'A message has to have "{name}", of type {kind.__name__}; got {value!r:.100}.')
    return value


def keys_of(header: Mapping[str, Any], name: str, *default: Any) -> list[str]:
    """A field of a header that is a list of keys of pieces."""
    keys = field_of(header, name, list, *default)
    if not all(isinstance(key, str) for key in keys):
        raise MessageError(f'"{name}" is a list of keys, got {keys!r:.100}.')
    return keys


def _new_piece(described: Mapping[str, Any], given: list[np.ndarray]) -> NewPiece:
    key, initial = field_of(described, "key", str), field_of(described, "initial", str)
    shape = tuple(field_of(described, "shape", list))
    name = field_of(described, "dtype", str)
    try:
        dtype = np.dtype(jnp.dtype(name))
    except TypeError:
        raise InvalidArgumentError(f'Piece "{key}" cannot have the dtype {name}: JAX has none.') from None
    value = given.pop() if initial == "array" else None
    if value is not None and (value.shape, value.dtype) != (shape, dtype):
        raise InvalidArgumentError(
            f'Piece "{key}" is to be {dtype.name}{list(shape)}, and the value that came is '
            f"{value.dtype.name}{list(value.shape)}. Send a value of that shape and dtype."
        )
    return NewPiece(key, (shape, dtype), initial, value)


def _gradients(header: Mapping[str, Any], operands: Sequence[np.ndarray]) -> Gradients | None:
    """What a step has for a round: the last ones of its operands."""
    given = header.get("gradients")
    if given is None:
        return None
    number, count = field_of(given, "round", int), field_of(given, "operands", int)
    if number < 0 or not 0 <= count <= len(operands):
        raise MessageError(
            f"Gradients of round {number} are {count} arrays, and {len(operands)} operands came. Count them."
        )
    return Gradients(number, field_of(given, "program", str), operands[len(operands) - count :])


def once_of(header: Mapping[str, Any]) -> tuple[Closure | None, int]:
    """The number of a call that is done once, None if it has none; and below which number all have ended."""
    return _closure(header, "number"), field_of(header, "low", int, None) or 0


def _closure(header: Mapping[str, Any], name: str) -> Closure | None:
    given = field_of(header, name, list, None)
    if given is None:
        return None
    if len(given) != 2 or not isinstance(given[0], str) or type(given[1]) is not int or given[1] < 0:
        raise MessageError(f"A {name} is [incarnation, number ≥ 0], got {given!r:.100}.")
    return Closure(given[0], given[1])


def _known_versions(header: Mapping[str, Any], name: str) -> list[tuple[str, Version | None]]:
    return [_known_version(pair, name) for pair in field_of(header, name, list, [])]


def _known_version(pair: Any, name: str) -> tuple[str, Version | None]:
    # (A ``match`` of the same takes ten times as long, and there are some for each variable in each step.)
    if type(pair) in _PAIRS and len(pair) == 2 and type(pair[0]) is str:
        key, version = pair
        if version is None:
            return key, None
        if type(version) in _PAIRS and len(version) == 2:
            instance, number = version
            if type(instance) is str and type(number) is int:
                return key, (instance, number)
    raise MessageError(f'"{name}" is a list of [key, [instance, number] or null], got {pair!r:.100}.')

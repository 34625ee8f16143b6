"""``StoreContents``: what a parameter server holds, and what updates make of it. Its owner has the lock."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import jax
import numpy as np

from replicax._src.errors import InvalidArgumentError
from replicax._src.parameter_servers.errors import UnknownProgramError
from replicax._src.parameter_servers.programs.programs import UpdateProgram
from replicax._src.parameter_servers.store.held_gradients import HeldGradients
from replicax._src.parameter_servers.store.held_pieces import HeldPiece, check_state, few, staleness_of, text
from replicax._src.parameter_servers.store.held_values import Spec
from replicax._src.parameter_servers.store.log import Position
from replicax._src.parameter_servers.store.requests import ApplyRound, Closure, NewPiece, Step
from replicax._src.parameter_servers.store.store_statistics import StoreStatistics
from replicax._src.parameter_servers.store.unwritten import Unwritten
from replicax._src.parameter_servers.store.updates import CompiledUpdate
from replicax._src.parameter_servers.store.window import Windows


class Progress(NamedTuple):
    """Tells a snapshot keeper what has changed.

    Attributes:
      instance: ``Store.instance``.
      num_changes: It differs after every change of a value.
      num_created: The number of pieces that have been made, those that are gone included.
      position: The position of the last update, if updates are numbered.
    """

    instance: str
    num_changes: int
    num_created: int
    position: Position | None = None


@dataclass(frozen=True)
class StoreState:
    """All that a store has, at one moment: for another one.

    Attributes:
      content: What is not arrays, as JSON.
      pieces: Key, number of the version, and a view of the value; to be let go soon.
      programs: The programs that update pieces.
      gradients: Those that wait for their round: its number, that of the closure, the program's digest, arrays.
    """

    content: dict[str, Any]
    pieces: deque[tuple[str, int, np.ndarray]]
    programs: Sequence[UpdateProgram]
    gradients: Sequence[tuple[int, int, str, Sequence[np.ndarray]]]


@final
class StoreContents:
    """Pieces, programs that update them, which closures have done so, gradients that wait, and counts.

    Attributes:
      instance: Random; see ``Store.instance``.
      owner: The incarnation of the coordinator that made all this; None if there is none.
      unwritten: What a snapshot that is being written has in common with the pieces; None if none is.
      num_created, num_changes: See ``Progress``.
      pieces: The pieces by key.
      programs: The programs by digest.
      windows: Which closures have been applied, by client, and which rounds and assignments.
      gradients: Those that wait for others of their round.
      statistics: Since the coordinator came.
    """

    def __init__(self) -> None:
        self.owner: str | None = None
        self.unwritten: Unwritten | None = None
        self.num_created = self.num_changes = 0
        self._highest_number = 0
        self.renew()
        self.clear()

    def renew(self) -> None:
        """Is another instance: versions go back, and what has a number again may be another value."""
        self.instance = uuid.uuid4().hex

    def clear(self) -> None:
        """Drops all."""
        self.pieces: dict[str, HeldPiece] = {}
        self.programs: dict[str, CompiledUpdate] = {}
        self.windows = Windows()
        self.gradients = HeldGradients()
        self.statistics = StoreStatistics()

    def counts(self) -> dict[str, Any]:
        """Counts what is held now and what has been done, as JSON."""
        return {
            "pieces": len(self.pieces),
            "bytes": sum(piece.num_bytes for piece in self.pieces.values()),
            "programs": len(self.programs),
            "gradient_bytes": self.gradients.num_bytes,
            **self.statistics.described(),
        }

    # --- for a snapshot, or another store --------------------------------------------------------------

    def described(self, epoch: int = 0) -> dict[str, Any]:
        """All but the arrays, as JSON; programs only by what they are."""
        return {
            "epoch": epoch,
            "instance": self.instance,
            "incarnation": self.owner,
            "time": time.time(),
            "updates": self.statistics.updates,
            "highest_number": self._highest_number,
            "windows": self.windows.described(),
            "num_held_gradients": sum(1 for _ in self.gradients.held()),
            "programs": [
                {"digest": digest, **compiled.program.described()}
                for digest, compiled in self.programs.items()
            ],
        }

    def take(self, described: Mapping[str, Any], pieces: dict[str, HeldPiece]) -> None:
        """Becomes what was ``described``, with these pieces and no program; another instance."""
        self.renew()
        self.owner, self._highest_number = described["incarnation"], described["highest_number"]
        self.clear()
        self.pieces = pieces
        self.windows = Windows.of(described["windows"])
        self.statistics.updates = described["updates"]

    def state(self) -> StoreState:
        """All of it. Until a view is let go, the first update of its piece needs other memory."""
        pieces = deque((piece.key, piece.number, piece.view()) for piece in self.pieces.values())
        programs = [compiled.program for compiled in self.programs.values()]
        return StoreState(self.described(), pieces, programs, list(self.gradients.held()))

    # --- what is there ---------------------------------------------------------------------------------

    def piece(self, key: Any) -> HeldPiece:
        """Raises InvalidArgumentError if there is none."""
        piece = self.pieces.get(key)
        if piece is None:
            raise InvalidArgumentError(
                f'There is no piece "{key}" on this parameter server, which has {few(self.pieces)}. Create it first.'
            )
        return piece

    def program(self, digest: str) -> CompiledUpdate:
        """Raises UnknownProgramError if it has not been sent."""
        program = self.programs.get(digest)
        if program is None:
            raise UnknownProgramError(
                f"The parameter server has no program {digest}: send it (again).", digest
            )
        return program

    def has(self, new: NewPiece, if_absent: bool) -> bool:
        """True if a piece is there already. Raises InvalidArgumentError if it should not be, or is another one."""
        piece = self.pieces.get(new.key)
        if piece is None:
            return False
        if if_absent and piece.spec == new.spec:
            return True
        raise InvalidArgumentError(
            f'A piece "{new.key}" is there already, {text(*piece.spec)}, and {text(*new.spec)} was to be '
            'created. Drop it first; or, for one that may be there with this shape and dtype, say "if_absent": true.'
        )

    def has_done(self, number: Closure | None, low: int) -> bool:
        """True if what is done once has been done. All of that client's calls below ``low`` have ended."""
        if number is None:
            return False
        window = self.windows.of_client(number.incarnation)
        window.raise_low(low)
        return number.number in window

    def did(self, number: Closure | None) -> None:
        """Remembers that what is done once has been done."""
        if number is not None:
            self.windows.of_client(number.incarnation).add(number.number)

    # --- changes ---------------------------------------------------------------------------------------

    def add(self, key: str, spec: Spec, value: jax.Array) -> None:
        """Has a new piece."""
        self._highest_number += 1
        self.num_created += 1
        self.num_changes += 1
        self.pieces[key] = HeldPiece(key, spec, value, self._highest_number)

    def change(self, piece: HeldPiece, value: jax.Array, rows: Sequence[np.ndarray] | None = None) -> None:
        """Gives a piece another value; ``rows``: the only ones that may differ."""
        piece.value = value
        piece.number += 1
        piece.changed.change(rows)
        if self.unwritten is not None:
            self.unwritten.change(piece.key)
        self._highest_number = max(self._highest_number, piece.number)
        self.num_changes += 1

    def update(self, step: Step, update: CompiledUpdate | None) -> bool:
        """Runs the update of a step, if its closure has not been applied. Returns whether it had been."""
        if update is None:
            return False
        closure = step.closure
        if closure is not None and closure.number in self.windows.of_client(closure.incarnation):
            self.statistics.duplicates += 1
            return True
        state = self._state(update)
        update.check_operands(step.operands)
        written = {update.program.state[position] for position in update.program.written}
        used = [(self.pieces[key], version) for key, version in step.used if key in written]
        staleness = staleness_of(used, self.instance)
        self._apply(update, state, step.operands)
        self.did(closure)
        if staleness is not None:
            self.statistics.staleness.count(staleness)
        self.statistics.updates += 1
        return False

    def hold(self, step: Step, update: CompiledUpdate) -> None:
        """Keeps the gradients of a step until those of its round are applied, unless they have been: then it is
        late.
        """
        assert step.closure is not None
        assert step.gradients is not None
        number, gradients = step.gradients.round_number, step.gradients.operands
        if number in self.windows.of_client(step.closure.of_rounds.incarnation):
            return
        self._state(update)
        self.gradients.hold(number, step.closure.number, update, gradients)

    def apply_round(self, asked: ApplyRound) -> bool:
        """Applies the mean of the gradients of a round, if that has not been done. Returns whether it had been."""
        number = asked.number.number
        self.gradients.end_below(asked.low)
        if self.has_done(asked.number, asked.low):
            return True
        found = self.gradients.mean(number, asked.closures)
        if found is not None:
            update, operands = found
            self._apply(update, self._state(update), operands)
            self.statistics.updates += 1
        self.did(asked.number)
        self.gradients.end(number)
        return False

    def _state(self, update: CompiledUpdate) -> list[HeldPiece]:
        state = [self.piece(key) for key in update.program.state]
        check_state(update, state)
        return state

    def _apply(
        self, update: CompiledUpdate, state: Sequence[HeldPiece], operands: Sequence[np.ndarray]
    ) -> None:
        written = [state[position] for position in update.program.written]
        results = update([piece.held() for piece in state], operands)
        for piece, value, rows in zip(written, results, update.rows(operands)):
            self.change(piece, value, rows)

"""``StoreContents``: what a parameter server holds, and how updates change it. Its owner holds the lock."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import jax
import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store.acceptance_rules import StoreRules, absent
from replicax._ps.store.held_gradients import HeldGradients
from replicax._ps.store.held_shards import HeldShard, check_state, few, text
from replicax._ps.store.held_values import Spec
from replicax._ps.store.requests import ApplyRound, NewShard, Step
from replicax._ps.store.store_statistics import StoreStatistics
from replicax._ps.store.unwritten import Unwritten
from replicax._ps.store.updates import CompiledUpdate
from replicax._src.program_kit.errors import InvalidArgumentError, UnknownProgramError


@dataclass(frozen=True)
class StoreState:
    """Everything in a store at one moment, to be sent to another store.

    Attributes:
      content: Everything besides arrays, as JSON.
      shards: The key, version number and a view of each shard. Release the views soon.
      programs: The programs that update shards.
      gradients: Gradients that wait for their round: the round, the closure, the program's digest, and the arrays.
    """

    content: dict[str, Any]
    shards: deque[tuple[str, int, np.ndarray]]
    programs: Sequence[UpdateProgram]
    gradients: Sequence[tuple[int, int, str, Sequence[np.ndarray]]]


@final
class StoreContents:
    """Shards, the programs that update them, the record of closures that did, gradients that wait, and counts.

    Attributes:
      rules: The owner, the calls that have run, and the versions.
      unwritten: The shards that a running snapshot has yet to write; None if no snapshot is being written.
      shards: The shards by key.
      programs: The programs by digest.
      gradients: Gradients that wait for others of their round.
      statistics: Counts since the coordinator's session began.
    """

    def __init__(self) -> None:
        self.rules = StoreRules(_new_instance())
        self.unwritten: Unwritten | None = None
        self._clear()

    def hello(self, incarnation: str) -> None:
        """Gives the contents to a coordinator. Those of another one are dropped."""
        if self.rules.hello(incarnation):
            self._clear()

    def leave(self) -> None:
        """Drops everything. It then belongs to no coordinator, and is another instance."""
        self.rules.leave(_new_instance())
        self._clear()

    def make_room(self, session: int | None = None) -> None:
        """Drops everything, because what was taken from a snapshot follows. Nobody is answered meanwhile."""
        self.rules.begin_restore(session)
        self._clear()

    def _clear(self) -> None:
        self.shards: dict[str, HeldShard] = {}
        self.programs: dict[str, CompiledUpdate] = {}
        self.gradients = HeldGradients()
        self.statistics = StoreStatistics()

    def counts(self) -> dict[str, Any]:
        """Counts what is held now and what has been done, as JSON."""
        return {
            "shards": len(self.shards),
            "bytes": sum(shard.num_bytes for shard in self.shards.values()),
            "programs": len(self.programs),
            "gradient_bytes": self.gradients.num_bytes,
            **self.statistics.described(),
        }

    # --- for a snapshot, or another store --------------------------------------------------------------

    def described(self, epoch: int = 0) -> dict[str, Any]:
        """Returns everything but the arrays, as JSON. Programs are listed by their digests."""
        return {
            "epoch": epoch,
            "time": time.time(),
            "updates": self.statistics.updates,
            **self.rules.described(),
            "num_held_gradients": sum(1 for _ in self.gradients.held()),
            "programs": [
                {"digest": digest, **compiled.program.described()}
                for digest, compiled in self.programs.items()
            ],
        }

    def take(self, described: Mapping[str, Any], shards: dict[str, HeldShard]) -> None:
        """Replaces everything by what was ``described``, with these shards and no program, as a new instance."""
        self._clear()
        self.rules.take(described, _new_instance())
        self.shards = shards
        self.statistics.updates = described["updates"]

    def state(self) -> StoreState:
        """Returns everything. While a view exists, the first update of its shard needs new memory."""
        shards = deque((shard.key, shard.number, shard.view()) for shard in self.shards.values())
        programs = [compiled.program for compiled in self.programs.values()]
        return StoreState(self.described(), shards, programs, list(self.gradients.held()))

    # --- contents ---------------------------------------------------------------------------------------

    def shard(self, key: Any) -> HeldShard:
        """Returns a shard. Raises InvalidArgumentError if there is none with this key."""
        shard = self.shards.get(key)
        if shard is None:
            raise InvalidArgumentError(
                f'There is no shard "{key}" on this parameter server, which has {few(self.shards)}. Create it first.'
            )
        return shard

    def program(self, digest: str) -> CompiledUpdate:
        """Returns a program. Raises UnknownProgramError if it has not been sent."""
        program = self.programs.get(digest)
        if program is None:
            raise UnknownProgramError(f"The parameter server has no program {digest}: send it again.", digest)
        return program

    def absent(self, new: Sequence[NewShard], if_absent: bool) -> list[bool]:
        """Returns for each shard whether it must be created. Raises InvalidArgumentError if one must not exist, or has
        another shape or dtype.
        """
        kinds = [(shard.key, shard.spec) for shard in new]
        held = {key: self.shards[key].spec for key, _ in kinds if key in self.shards}

        def refuse(key: str, spec: Any) -> InvalidArgumentError:
            return InvalidArgumentError(
                f'Shard "{key}" exists already as {text(*held[key])}, so it cannot be created as {text(*spec)}. '
                'Drop it first. If it may exist with this shape and dtype, say "if_absent": true.'
            )

        return absent(kinds, held, refuse, if_absent=if_absent)

    # --- changes ---------------------------------------------------------------------------------------

    def add(self, key: str, spec: Spec, value: jax.Array) -> None:
        """Adds a new shard."""
        self.shards[key] = HeldShard(key, spec, value, self.rules.created())

    def change(self, shard: HeldShard, value: jax.Array, rows: Sequence[np.ndarray] | None = None) -> None:
        """Gives a shard another value. If ``rows`` is given, only these rows may differ."""
        shard.value = value
        shard.number = self.rules.changed(shard.number)
        shard.changed.change(rows)
        if self.unwritten is not None:
            self.unwritten.change(shard.key)

    def update(self, step: Step, update: CompiledUpdate | None) -> bool:
        """Runs the update of a step, unless its closure has been applied. Returns True if it had been."""
        if update is None:
            return False
        closure = step.closure
        if self.rules.has_done(closure, step.low):
            self.statistics.duplicates += 1
            return True
        state = self._checked(step, update)
        written = {update.program.state[position] for position in update.program.written}
        used = [(self.shards[key].number, version) for key, version in step.used if key in written]
        staleness = self.rules.staleness(used)
        self._apply(update, state, step.operands)
        self.rules.did(closure)
        if staleness is not None:
            self.statistics.staleness.count(staleness)
        self.statistics.updates += 1
        return False

    def check_update(self, step: Step, update: CompiledUpdate) -> None:
        """Raises InvalidArgumentError if ``update`` would, so that nothing of the step is done before."""
        if not self.rules.has_done(step.closure, step.low):
            self._checked(step, update)

    def hold(self, step: Step, update: CompiledUpdate) -> None:
        """Keeps the gradients of a step until their round is applied. Gradients of a round that has been applied are
        dropped.
        """
        assert step.closure is not None
        assert step.gradients is not None
        number, gradients = step.gradients.round_number, step.gradients.operands
        if not self.rules.holds(step.closure, number):
            return
        self._state(update)
        self.gradients.hold(number, step.closure.number, update, gradients)

    def apply_round(self, request: ApplyRound) -> bool:
        """Applies the mean of the gradients of a round, unless that has been done. Returns True if it had been."""
        number = request.number.number
        self.gradients.end_below(request.low)
        if self.rules.has_done(request.number, request.low):
            return True
        found = self.gradients.mean(number, request.closures)
        if found is not None:
            update, operands = found
            self._apply(update, self._state(update), operands)
            self.statistics.updates += 1
        self.rules.did(request.number)
        self.gradients.end(number)
        return False

    def _checked(self, step: Step, update: CompiledUpdate) -> list[HeldShard]:
        state = self._state(update)
        update.check_operands(step.operands)
        return state

    def _state(self, update: CompiledUpdate) -> list[HeldShard]:
        state = [self.shard(key) for key in update.program.state]
        check_state(update, state)
        return state

    def _apply(
        self, update: CompiledUpdate, state: Sequence[HeldShard], operands: Sequence[np.ndarray]
    ) -> None:
        written = [state[position] for position in update.program.written]
        results = update([shard.held() for shard in state], operands)
        for shard, value, rows in zip(written, results, update.rows(operands)):
            self.change(shard, value, rows)


def _new_instance() -> str:
    return uuid.uuid4().hex

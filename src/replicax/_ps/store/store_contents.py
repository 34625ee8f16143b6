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
from replicax._ps.store.held_gradients import HeldGradients
from replicax._ps.store.held_shards import HeldShard, check_state, few, staleness_of, text
from replicax._ps.store.held_values import Spec
from replicax._ps.store.requests import ApplyRound, Closure, NewShard, Step
from replicax._ps.store.store_statistics import StoreStatistics
from replicax._ps.store.unwritten import Unwritten
from replicax._ps.store.updates import CompiledUpdate
from replicax._ps.store.window import Windows
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
      instance: A random id; see ``Store.instance``.
      owner: The session id of the coordinator that owns the contents; None if there is none.
      unwritten: The shards that a running snapshot has yet to write; None if no snapshot is being written.
      num_created, num_changes: See ``keeper_rules.Progress``.
      shards: The shards by key.
      programs: The programs by digest.
      windows: The applied closures, rounds and assignments of each client.
      gradients: Gradients that wait for others of their round.
      statistics: Counts since the coordinator's session began.
    """

    def __init__(self) -> None:
        self.owner: str | None = None
        self.unwritten: Unwritten | None = None
        self.num_created = self.num_changes = 0
        self._highest_number = 0
        self.renew()
        self.clear()

    def renew(self) -> None:
        """Becomes another instance, because version numbers restart and may stand for other values."""
        self.instance = uuid.uuid4().hex

    def clear(self) -> None:
        """Drops everything."""
        self.shards: dict[str, HeldShard] = {}
        self.programs: dict[str, CompiledUpdate] = {}
        self.windows = Windows()
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

    def take(self, described: Mapping[str, Any], shards: dict[str, HeldShard]) -> None:
        """Replaces everything by what was ``described``, with these shards and no program, as a new instance."""
        self.renew()
        self.owner, self._highest_number = described["incarnation"], described["highest_number"]
        self.clear()
        self.shards = shards
        self.windows = Windows.of(described["windows"])
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

    def has(self, new: NewShard, if_absent: bool) -> bool:
        """True if a shard exists already. Raises InvalidArgumentError if it must not exist, or has another shape or
        dtype.
        """
        shard = self.shards.get(new.key)
        if shard is None:
            return False
        if if_absent and shard.spec == new.spec:
            return True
        raise InvalidArgumentError(
            f'Shard "{new.key}" exists already as {text(*shard.spec)}, so it cannot be created as {text(*new.spec)}. '
            'Drop it first. If it may exist with this shape and dtype, say "if_absent": true.'
        )

    def has_done(self, number: Closure | None, low: int) -> bool:
        """True if a call that must run once has run. All calls of that client below ``low`` have ended."""
        if number is None:
            return False
        window = self.windows.window_of(number.incarnation)
        window.raise_low(low)
        return number.number in window

    def did(self, number: Closure | None) -> None:
        """Records that a call that must run once has run."""
        if number is not None:
            self.windows.window_of(number.incarnation).add(number.number)

    # --- changes ---------------------------------------------------------------------------------------

    def add(self, key: str, spec: Spec, value: jax.Array) -> None:
        """Adds a new shard."""
        self._highest_number += 1
        self.num_created += 1
        self.num_changes += 1
        self.shards[key] = HeldShard(key, spec, value, self._highest_number)

    def change(self, shard: HeldShard, value: jax.Array, rows: Sequence[np.ndarray] | None = None) -> None:
        """Gives a shard another value. If ``rows`` is given, only these rows may differ."""
        shard.value = value
        shard.number += 1
        shard.changed.change(rows)
        if self.unwritten is not None:
            self.unwritten.change(shard.key)
        self._highest_number = max(self._highest_number, shard.number)
        self.num_changes += 1

    def update(self, step: Step, update: CompiledUpdate | None) -> bool:
        """Runs the update of a step, unless its closure has been applied. Returns True if it had been."""
        if update is None:
            return False
        closure = step.closure
        if closure is not None and closure.number in self.windows.window_of(closure.incarnation):
            self.statistics.duplicates += 1
            return True
        state = self._state(update)
        update.check_operands(step.operands)
        written = {update.program.state[position] for position in update.program.written}
        used = [(self.shards[key], version) for key, version in step.used if key in written]
        staleness = staleness_of(used, self.instance)
        self._apply(update, state, step.operands)
        self.did(closure)
        if staleness is not None:
            self.statistics.staleness.count(staleness)
        self.statistics.updates += 1
        return False

    def hold(self, step: Step, update: CompiledUpdate) -> None:
        """Keeps the gradients of a step until their round is applied. Gradients of a round that has been applied are
        dropped.
        """
        assert step.closure is not None
        assert step.gradients is not None
        number, gradients = step.gradients.round_number, step.gradients.operands
        if number in self.windows.window_of(step.closure.round_closure.incarnation):
            return
        self._state(update)
        self.gradients.hold(number, step.closure.number, update, gradients)

    def apply_round(self, request: ApplyRound) -> bool:
        """Applies the mean of the gradients of a round, unless that has been done. Returns True if it had been."""
        number = request.number.number
        self.gradients.end_below(request.low)
        if self.has_done(request.number, request.low):
            return True
        found = self.gradients.mean(number, request.closures)
        if found is not None:
            update, operands = found
            self._apply(update, self._state(update), operands)
            self.statistics.updates += 1
        self.did(request.number)
        self.gradients.end(number)
        return False

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

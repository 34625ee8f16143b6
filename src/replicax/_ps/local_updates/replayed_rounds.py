"""``ReplayedRounds``: the outer parameters of all rounds, computed again by the programs of a real ``Store``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Final, final

import numpy as np

from replicax._ps.local_updates.background_exchange import (
    AskServer,
    ExchangedFragment,
    create_fragment,
    send_program,
)
from replicax._ps.local_updates.fragment_programs import state_of
from replicax._ps.local_updates.int8_blocks import encoded
from replicax._ps.local_updates.logged_events import LoggedPush, LoggedRound, ServedVersion
from replicax._ps.local_updates.replay_file import checksum_of
from replicax._ps.local_updates.replay_plan import ReplayPlan
from replicax._ps.local_updates.round_state import MemberState
from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
from replicax._src.program_kit.errors import ReplayDifferenceError

_SESSION: Final = "replay"
_OF_FIRST: Final = "They are what the first group began with: make its model from groups.index alone, as in the run, with the same seeds."
_OF_ROUND: Final = (
    "All pushes in it are equal, so the log is damaged, the outer optimizer differs, or the servers of the run computed other "
    "bits than this machine."
)


@final
class ReplayedRounds:
    """The server of a replay.

    Args:
      plan: What the run did.

    Attributes:
      num_compared: The number of versions whose checksums were compared.
    """

    def __init__(self, plan: ReplayPlan):
        self.num_compared = 0
        self._plan = plan
        self._store = Store()
        self._store.hello(_SESSION)
        self._fragments: Sequence[ExchangedFragment] = ()
        self._pushes: dict[LoggedPush, np.ndarray] = {}
        self._outer: dict[tuple[int, ServedVersion], np.ndarray] = {}
        self._versions: dict[int, ServedVersion] = {}  # the newest of each fragment
        self._pushed: Counter[tuple[int, int]] = Counter()
        self._uses = Counter(plan.num_rounds_of)
        self._last_uses = {
            (fragment, origin): restarts for (fragment, restarts), origin in plan.origins.items()
        }
        self._snapshots: dict[tuple[int, ServedVersion], Sequence[np.ndarray]] = {}
        self._unread = Counter(plan.num_adoptions)

    def join(
        self, exchanged: Callable[[Sequence[AskServer]], list[ExchangedFragment]], num_fragments: int
    ) -> Sequence[ExchangedFragment]:
        """Returns the fragments, which the first process makes."""
        self._fragments = self._fragments or exchanged([self._ask] * num_fragments)
        return self._fragments

    def create(self, fragment: int, theta: np.ndarray) -> None:
        """Creates a fragment, and compares it with the version 0 of the run.

        Raises:
          ReplayDifferenceError: It differs.
        """
        each = self._fragments[fragment]
        create_fragment(each, theta, 1)
        for program in (each.programs.claim, each.programs.push, each.programs.close):
            send_program(self._ask, program)
        for member in range(self._plan.num_groups):
            self._run(
                fragment, each.programs.claim, each.programs.claim_operands(member, MemberState(), 1 + member)
            )
        self._note(fragment, ServedVersion(0, 0))

    def is_created(self, fragment: int) -> bool:
        """True if a process has created the fragment."""
        return fragment in self._versions

    def give(self, push: LoggedPush, values: np.ndarray) -> None:
        """Takes a push of the replay, float32 [n].

        Raises:
          ReplayDifferenceError: It differs from that of the run.
        """
        version = self._plan.versions_of.get(push)
        logged, checksum = self._plan.push_checksums.get(push), checksum_of(values)
        if logged not in (None, checksum):
            raise ReplayDifferenceError(
                f"The replay differs from the run in round {version} of fragment {push.fragment}: push {push.number} of group "
                f"{push.group} has the checksum {checksum:08x}, and its log has {logged:08x}. Make the model and the data of a "
                "group from groups.index alone, as in the run: the same values, order, seeds and devices."
            )
        if version is not None:
            self._pushes[push] = values

    def has(self, fragment: int, served: ServedVersion) -> bool:
        """Closes the rounds of which all pushes are there. True if a version was among them, now or before.

        Raises:
          ReplayDifferenceError: Outer parameters differ from those of the run.
        """
        if fragment not in self._versions:
            return False
        while self._versions[fragment] < served:
            following = self._following(fragment)
            if following is not None:
                if not all(push in self._pushes for push in following.pushes):
                    return False
                self._close(following)
            elif not self._restart(fragment):
                return False
        return True

    def outer(self, fragment: int, served: ServedVersion) -> np.ndarray:
        """Returns the outer parameters of a version for one adoption."""
        key = fragment, served
        outer = self._outer[key]
        self._unread[key] -= 1
        if not self._unread[key]:
            del self._outer[key]
        return outer

    def _following(self, fragment: int) -> LoggedRound | None:
        """The round after the newest version, on the same server."""
        restarts, version = self._versions[fragment]
        return self._plan.rounds.get((fragment, ServedVersion(restarts, version + 1)))

    def _restart(self, fragment: int) -> bool:
        """Goes back to the snapshot with which the next server came. False if there was none."""
        restarts = self._versions[fragment].restarts + 1
        origin = self._plan.origins.get((fragment, restarts))
        snapshot = None if origin is None else self._snapshots.get((fragment, origin))
        if origin is None or snapshot is None:
            return False
        if self._last_uses[fragment, origin] == restarts:
            del self._snapshots[fragment, origin]
        programs = self._fragments[fragment].programs
        keys = [key for key, _, _ in programs.shards.values()]
        self._ask(Message({"op": "assign", "keys": keys}, list(snapshot)))
        for group, each in enumerate(state_of(snapshot[[*programs.shards].index("rounds")]).members):
            self._pushed[fragment, group] = each.pushed
        self._note(fragment, ServedVersion(restarts, origin.version))
        return True

    def missing(self, fragment: int) -> str:
        """Says what the next round of a fragment lacks."""
        if fragment not in self._versions:
            return f"no log says which group created fragment {fragment}"
        following = self._following(fragment)
        if following is None:
            return f"no log has the round after version {self._versions[fragment]} of fragment {fragment}"
        version = following.served
        lacking = [push for push in following.pushes if push not in self._pushes]
        return f"round {version} of fragment {fragment} lacks pushes of the groups " + ", ".join(
            sorted({str(push.group) for push in lacking})
        )

    def _close(self, following: LoggedRound) -> None:
        fragment, (_, version) = following.fragment, following.served
        each = self._fragments[fragment]
        programs = each.programs
        for push in following.pushes:
            values = self._pushes[push]
            self._uses[push] -= 1
            if not self._uses[push]:
                del self._pushes[push]
            after = self._pushed[fragment, push.group]
            self._pushed[fragment, push.group] += 1
            sent = encoded(values) if programs.is_compressed else [values]
            owner = 1 + push.group
            operands = programs.push_operands(push.group, owner, after + 1, after, push.tokens, sent)
            self._run(fragment, programs.push, operands)
        operands = programs.close_operands(version - 1, 1, each.rate, each.decay, is_flush=following.is_flush)
        closed = state_of(self._run(fragment, programs.close, operands)[0]).version
        assert closed == version, (closed, version)
        self._note(fragment, following.served)

    def _note(self, fragment: int, version: ServedVersion) -> None:
        self._versions[fragment] = version
        key = fragment, version
        if key in self._last_uses:
            names = self._fragments[fragment].programs.shards
            self._snapshots[key] = [np.array(self._run(fragment, None, [], name)[0]) for name in names]
        logged = self._plan.outer_checksums.get(key)
        if not logged:
            return
        outer = self._outer[key] = np.array(self._run(fragment, None, [], "theta")[0])
        checksum = checksum_of(outer)
        for process, other in logged:
            if other != checksum:
                raise ReplayDifferenceError(
                    f"The replay differs from the run in the outer parameters of version {version} of fragment {fragment}: "
                    f"their checksum is {checksum:08x}, and the log of {process.name} has {other:08x}. "
                    + (_OF_ROUND if version.version else _OF_FIRST)
                )
        self.num_compared += 1

    def _run(
        self,
        fragment: int,
        program: UpdateProgram | None,
        operands: Sequence[np.ndarray],
        read: str = "rounds",
    ) -> Sequence[np.ndarray]:
        pull = [[self._fragments[fragment].programs.shards[read][0], None]]
        header = {"op": "step", "closure": None, "program": program and program.digest, "pull": pull}
        return self._ask(Message(header, list(operands))).arrays

    def _ask(self, message: Message) -> Message:
        return self._store.answer(Message({**message.header, "incarnation": _SESSION}, message.arrays))

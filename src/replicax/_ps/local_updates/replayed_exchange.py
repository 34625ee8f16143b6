"""``ReplayedExchange``: the exchange of one process, in which a log says what was pushed and adopted when."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

import numpy as np

from replicax._ps.local_updates.background_exchange import ExchangedFragment
from replicax._ps.local_updates.group_exchange import PlaceOuter
from replicax._ps.local_updates.logged_events import (
    LoggedAdoption,
    LoggedProcess,
    LoggedPush,
    ServedVersion,
)
from replicax._ps.local_updates.replay_file import GroupCall, checksum_of
from replicax._ps.local_updates.replay_plan import ReplayPlan
from replicax._ps.local_updates.replayed_rounds import ReplayedRounds
from replicax._ps.local_updates.state_values import StateValues
from replicax._ps.local_updates.stored_position import StoredPosition
from replicax._ps.local_updates.unmerged_progress import UnmergedProgress
from replicax._src.program_kit.errors import InvalidArgumentError, ReplayDifferenceError


class EndOfLogError(BaseException):
    """Ends a program where its process died in the run. Programs do not catch what is no ``Exception``."""


@final
class ReplayedExchange:
    """The exchange of a process, with the methods of ``BackgroundExchange``.

    Args:
      process: What the process did.
      plan: What the run did.
      rounds: The outer parameters.
      fragments: The fragments.
      place: Puts outer parameters where the group has them.
      steps: Returns the number of steps that the process has counted.
      wait_for: Lets other processes run until there is a version of a fragment.

    Attributes:
      is_finished: True after ``finish``.
    """

    def __init__(
        self,
        process: LoggedProcess,
        plan: ReplayPlan,
        rounds: ReplayedRounds,
        fragments: Sequence[ExchangedFragment],
        place: PlaceOuter,
        steps: Callable[[], int],
        wait_for: Callable[[int, ServedVersion], None],
    ):
        self.is_finished = False
        self._process, self._plan, self._rounds, self._fragments = process, plan, rounds, fragments
        self._place, self._steps, self._wait_for = place, steps, wait_for
        self._calls = deque(process.calls)
        self._now: deque[LoggedPush | LoggedAdoption] = deque()
        self._call: GroupCall | None = None
        self._finish_step = process.finish_step
        self._values: list[Any] = []
        self._progress: list[UnmergedProgress[Any] | StateValues[Any]] = []
        self._outer: dict[int, Any] = {}
        self._adopted: dict[int, int] = {}
        self._tokens = [0] * len(fragments)
        self._tokens_of: dict[tuple[int, int], int] = {}  # by fragment and number of the push
        self._counts = {"pushes": 0, "adoptions": 0, "lost_pushes": 0, "silent_servers": 0}

    @property
    def position(self) -> StoredPosition:
        return StoredPosition()  # logs have none

    def note_position(self, position: StoredPosition) -> None:
        del position

    def begin(self, values: Sequence[Any], timeout_s: float) -> list[Any]:
        sizes = [each["size"] for each in self._process.header["fragments"]]
        own = [each.size for each in values]
        if own != sizes:
            raise InvalidArgumentError(
                f"rx.testing.replay_groups: train attached fragments of {own} values in {self._process.name}, and the run had "
                f"{sizes}. Attach the model of the run."
            )
        self._values = list(values)
        self._progress = [
            StateValues(each) if fragment.programs.is_state else UnmergedProgress(each)
            for fragment, each in zip(self._fragments, values, strict=True)
        ]
        for fragment, each in enumerate(values):
            theta = np.asarray(each, np.float32)
            if not self._rounds.is_created(fragment) and self._creates(fragment, theta):
                self._rounds.create(fragment, theta)
        self._now.extend(self._calls.popleft().events)
        while self._now:
            self._do(self._now.popleft())
        if len(self._adopted) < len(self._fragments):
            raise EndOfLogError
        return list(self._values)

    @property
    def fetched(self) -> Sequence[int]:
        if self._now:
            return [event.fragment for event in self._now]
        step = self._steps()
        self._check_steps(step)
        following = self._calls[0]
        if following.step != step or following.call is not GroupCall.STEP:
            return ()
        return [event.fragment for event in following.events if isinstance(event, LoggedAdoption)]

    @property
    def version(self) -> int:
        return min(self._adopted.values(), default=0)

    @property
    def stops(self) -> bool:
        return self._finish_step is not None and self._steps() >= self._finish_step

    def note_call(self, steps: int, call: GroupCall) -> None:
        if self._now:
            raise self._differs(f"does not exchange fragment {self._now[0].fragment} before step {steps}")
        self._check_steps(steps)
        following = self._calls[0]
        is_this = (following.call, following.step) == (call, steps)
        if not is_this and call is not GroupCall.STEP:
            raise self._differs(f"calls groups.{call.name.lower()} after step {steps}")
        self._call = call
        if is_this:
            self._now.extend(self._calls.popleft().events)

    def boundary(self, fragment: int, values: Any, tokens: int) -> Any:
        self._tokens[fragment] += tokens
        return self.adopt(fragment, values)

    def adopt(self, fragment: int, values: Any) -> Any:
        self._values[fragment] = values
        if self._call is not GroupCall.FINISH:
            while self._now and self._now[0].fragment == fragment:
                self._do(self._now.popleft())
        return self._values[fragment]

    def rebase(self, fragment: int) -> None:
        """Returns None: ``adopt`` does all."""

    def wait(self, timeout_s: float) -> None:
        pass

    def outer(self) -> list[Any]:
        return [self._outer[fragment] for fragment in range(len(self._fragments))]

    def stop(self) -> None:
        pass

    def finish(self, timeout_s: float) -> list[Any]:
        while self._now:
            self._do(self._now.popleft())
        self.is_finished = True
        return list(self._values)

    @property
    def finished(self) -> Sequence[int]:
        """No groups: a replay has no syncers, for whose end this is."""
        return ()

    def close(self) -> None:
        pass

    def statistics(self) -> Mapping[str, int]:
        return dict(self._counts)

    @property
    def lacks(self) -> LoggedPush | LoggedAdoption | None:
        """What the program of the process has not repeated; None if it is at the end of its log."""
        left = [*self._now, *(event for call in self._calls for event in call.events)]
        return left[0] if left else None

    def _creates(self, fragment: int, theta: np.ndarray) -> bool:
        """True if the process is known as the creator of a fragment; or nobody is, and its values are version 0."""
        if any(fragment in each.created for each in self._plan.processes):
            return fragment in self._process.created
        logged = self._plan.outer_checksums.get((fragment, ServedVersion(0, 0)), ())
        return checksum_of(theta) in {checksum for _, checksum in logged}

    def _do(self, event: LoggedPush | LoggedAdoption) -> None:
        fragment = event.fragment
        if isinstance(event, LoggedPush):
            push = self._progress[fragment].take(event.number, self._values[fragment])
            tokens, self._tokens[fragment] = self._tokens[fragment], 0
            if tokens != event.tokens:
                raise self._differs(
                    f"has trained on {tokens} rows at push {event.number} of fragment {fragment}, and not on {event.tokens}"
                )
            self._tokens_of[fragment, event.number] = tokens
            self._rounds.give(event, np.asarray(push, np.float32))
            self._counts["pushes"] += 1
            return
        self._wait_for(fragment, event.served)
        outer = self._place(fragment, self._rounds.outer(fragment, event.served))
        if event.drops:
            self._tokens[fragment] = 0
        self._tokens[fragment] += sum(self._tokens_of[fragment, number] for number in event.returns)
        self._values[fragment] = self._progress[fragment].adopt(
            self._values[fragment], outer, keeps=event.keeps, returns=event.returns, drops=event.drops
        )
        self._outer[fragment], self._adopted[fragment] = outer, event.served.version
        self._counts["adoptions"] += 1

    def _check_steps(self, step: int) -> None:
        """Checks that the program is not beyond the next call in the log."""
        if not self._calls:
            raise EndOfLogError
        following = self._calls[0]
        if following.step < step:
            what = GroupCall.STEP if following.call is None else following.call
            raise self._differs(
                f"is at step {step}, and called groups.{what.name.lower()} after step {following.step}"
            )

    def _differs(self, what: str) -> ReplayDifferenceError:
        return ReplayDifferenceError(
            f"The replay differs from the run: {self._process.name} {what}, unlike in the run. Give `train` the loop and the "
            "data of the run."
        )

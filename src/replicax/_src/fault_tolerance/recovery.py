"""``OpenRecovery``: the end of one epoch, until this process goes on in the next, and its lines of the log."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, final

from replicax._src.control.epoch_member import Begin

Holders = Mapping[int, int]
"""The member that computes each replica."""

_HOW: Final = {
    "died": "died",
    "left": "ended its program early",
    "raised": "raised an error",
    "gave_up": "gave up",
    "silent": "went silent",
    "unreachable": "could not be reached by others",
    "late": "did not come to its first step in time",
}


@final
class OpenRecovery:
    """A failure that is being repaired, or the entry of a replacement.

    Args:
      since: The time at which the training thread learned of it.
      step: The step that this process was in, in words; None if it was between steps.
      after: The last step that was committed before, in words; None before the first one.
      chief: The chief then. It writes the lines, unless it is gone when they are written.
      is_opening: True if this process has ended the epoch, to let a replacement enter.

    Attributes:
      gone: Each process that is gone since then: its number, the way in which it ended, a text.
      entered: The replacements that have entered since then.
      reason: The reason why the first epoch ended here, for failures without a death.
    """

    def __init__(
        self, since: float, step: str | None, after: str | None, chief: int, *, is_opening: bool = False
    ):
        self.since, self.chief = since, chief
        self._step, self._after = step, after
        self._is_opening = is_opening
        self.gone: list[tuple[int, str, str]] = []
        self.entered: tuple[int, ...] = ()
        self.reason = "the connections ended"

    def begin(self, begin: Begin) -> None:
        """Notes that the next epoch begins."""
        self.gone += begin.gone
        stayed = [number for number in self.entered if number in begin.members]
        self.entered = tuple(sorted({*stayed, *begin.entering}))

    @property
    def is_of_failure(self) -> bool:
        """True unless the epoch ended for a replacement."""
        return bool(self.gone) or not (self.entered or self._is_opening)

    @property
    def is_over_between_steps(self) -> bool:
        """True if no step has to be repeated, and no replacement takes part in its first step."""
        return self._step is None and not self.entered

    def describe(
        self,
        names: Sequence[str],
        before: Holders,
        now: Holders,
        num_rows: int | None,
        source: int | None,
        seconds: float,
    ) -> str:
        """Returns the line of the log.

        Args:
          names: The names of all tasks.
          before, now: The holders of the replicas before the failure and after it.
          num_rows: The number of rows of the step; None if it has none.
          source: The member that gave this process the sums of the step; None if this process repeated it.
          seconds: The duration of the recovery.
        """
        if self._step is not None:
            when = f"in {self._step}"
        else:
            when = "before the first step" if self._after is None else f"after {self._after}"
        adopted = self._adopted(names, before, now)
        repeated = self._repeated(names, num_rows, source)
        parts = [part for part in (adopted, repeated) if part]
        second = "; ".join(parts)
        second = f" {_capitalized(second)}" if second else " All continue"
        return f"{_capitalized(self._gone(names))} {when}.{second} ({seconds:.2f} s)."

    def describe_return(
        self, names: Sequence[str], entered: int, step: str, before: Holders, now: Holders, seconds: float
    ) -> str:
        """Returns the line of the log about a replacement that has taken part in its first step.

        Args:
          names: The names of all tasks.
          entered: The number of the replacement's task.
          step: That step, in words.
          before, now: The holders of the replicas before it entered, and since then.
          seconds: The time for which the others have waited for it, with that step.
        """
        givers: dict[int, list[int]] = {}
        for replica, holder in sorted(now.items()):
            if holder == entered != before[replica]:
                givers.setdefault(before[replica], []).append(replica)
        taken = _joined(
            [f"{_replicas(replicas)} back from {names[giver]}" for giver, replicas in givers.items()]
        )
        text = f"{names[entered]} is back in {step}" + (f": it took {taken}" if taken else "")
        return f"{_capitalized(text)} ({seconds:.2f} s)."

    def _gone(self, names: Sequence[str]) -> str:
        if not self.gone:
            return f"an exchange failed ({self.reason})"
        by_how: dict[str, list[str]] = {}
        for number, how, _ in sorted(self.gone):
            by_how.setdefault(_HOW.get(how, how), []).append(names[number])
        return _joined([f"{_joined(numbers)} {how}" for how, numbers in by_how.items()])

    def _adopted(self, names: Sequence[str], before: Holders, now: Holders) -> str:
        adopted: dict[int, list[int]] = {}  # by their new holder
        for replica, holder in sorted(now.items()):
            if before[replica] != holder:
                adopted.setdefault(holder, []).append(replica)
        if (
            len(adopted) == 1
            and {before[replica] for replica in next(iter(adopted.values()))} <= self._numbers
        ):
            ((holder, replicas),) = adopted.items()
            owner = "its" if len(self._numbers) == 1 else "their"
            many = "replica" if len(replicas) == 1 else f"{len(replicas)} replicas"
            return f"{names[holder]} adopted {owner} {many}"
        return _joined(
            [f"{names[holder]} adopted {_replicas(replicas)}" for holder, replicas in adopted.items()]
        )

    @property
    def _numbers(self) -> set[int]:
        return {number for number, _, _ in self.gone}

    def _repeated(self, names: Sequence[str], num_rows: int | None, source: int | None) -> str:
        if self._step is None:
            return ""
        if source is not None:
            return f"{names[source]} had the sums of the step, and gave them"
        if num_rows is None:
            return "the step was repeated"
        rows = "its only row" if num_rows == 1 else f"all of its {num_rows:,} rows"
        return f"the step was repeated with {rows}"


def _replicas(numbers: Sequence[int]) -> str:
    return f"replica{'s' * (len(numbers) > 1)} {_joined(list(map(str, numbers)))}"


def _joined(words: Sequence[str]) -> str:
    """Returns ``"a, b and c"``."""
    return " and ".join([", ".join(words[:-1]), words[-1]]) if len(words) > 1 else "".join(words)


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]

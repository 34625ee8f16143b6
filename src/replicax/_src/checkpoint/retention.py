"""The rules for which checkpoints are kept: the latest, the best, and some per hour. The rules are independent."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.checkpoint.contents import Contents
from replicax._src.vocabulary.errors import InvalidArgumentError

BestFn = Callable[[Any], float]


@final
@dataclass(frozen=True)
class CheckpointRecord:
    """A checkpoint of a directory.

    Attributes:
      path: Its path.
      contents: The contents of its manifest.
    """

    path: str
    contents: Contents


def _is_whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= at_least


@final
@dataclass(frozen=True)
class Retention:
    """The rules. A checkpoint is kept if any rule wants it.

    Attributes:
      max_to_keep: The number of latest checkpoints to keep; None for all.
      keep_best: The number of best checkpoints to keep, of those that were saved with metrics.
      best_fn: A function that returns a number for the metrics of a checkpoint.
      best_mode: "max" or "min".
      every_n_hours: The hours for each of which one more checkpoint is kept.

    Raises:
      InvalidArgumentError: A number is too small, the mode is another one, or ``keep_best`` has no ``best_fn``.
    """

    max_to_keep: int | None = 5
    keep_best: int = 0
    best_fn: BestFn | None = None
    best_mode: str = "max"
    every_n_hours: float | None = None

    def __post_init__(self) -> None:
        if self.max_to_keep is not None and not _is_whole(self.max_to_keep, at_least=1):
            raise InvalidArgumentError(
                f"max_to_keep must be a whole number, at least 1, or None for all; got {self.max_to_keep!r}."
            )
        if self.best_mode not in ("max", "min"):
            raise InvalidArgumentError(f"best_mode must be 'max' or 'min'; got {self.best_mode!r}.")
        if self.best_fn is not None and not callable(self.best_fn):
            raise InvalidArgumentError(
                "best_fn must be a function of the metrics, such as lambda metrics: metrics['loss']; got "
                f"{self.best_fn!r}."
            )
        if not _is_whole(self.keep_best, at_least=0) or (self.keep_best and self.best_fn is None):
            raise InvalidArgumentError(
                f"keep_best={self.keep_best!r} must be a whole number, at least 0, and needs a best_fn that "
                "rates a checkpoint: best_fn=lambda metrics: metrics['accuracy']."
            )
        hours = self.every_n_hours
        if hours is not None and not (isinstance(hours, numbers.Real) and hours > 0):
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours must be positive, or None; got {self.every_n_hours!r}."
            )

    def by_quality(self, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        """Returns the checkpoints with metrics, best first; of equal ones the newer first. NaN is last."""
        if self.best_fn is None:
            return []
        sign = 1.0 if self.best_mode == "max" else -1.0

        def quality(record: CheckpointRecord) -> tuple[bool, float, float]:
            value = sign * self._judge_earlier(record.contents.metrics)
            is_number = not math.isnan(value)
            return is_number, value if is_number else 0.0, record.contents.time_s

        return sorted((r for r in records if r.contents.metrics is not None), key=quality, reverse=True)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Checks that metrics can be judged, before a checkpoint is saved with them.

        Raises:
          InvalidArgumentError: ``best_fn`` raises an error, or does not return a number.
        """
        if self.best_fn is None:
            return
        try:
            float(self.best_fn(metrics))
        except Exception as error:
            raise InvalidArgumentError(
                f"best_fn cannot judge the metrics {dict(metrics)!r:.200} ({type(error).__name__}: {error}). It must "
                "return a number for the metrics of each save; leave metrics out of a save that should not be judged."
            ) from error

    def _judge_earlier(self, metrics: Any) -> float:
        """Judges an existing checkpoint. Returns NaN if ``best_fn`` fails, because the checkpoint may have other
        metrics.
        """
        assert self.best_fn is not None
        try:
            return float(self.best_fn(metrics))
        except Exception:
            return math.nan

    def to_remove(self, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        """Returns the checkpoints that no rule wants.

        Args:
          records: All checkpoints, oldest first.
        """
        if self.max_to_keep is None:
            return []
        kept = {r.path for r in records[-self.max_to_keep :]}
        kept |= {r.path for r in self.by_quality(records)[: self.keep_best]}
        kept |= {r.path for r in self._of_hours(records)}
        return [r for r in records if r.path not in kept]

    def _of_hours(self, records: Sequence[CheckpointRecord]) -> list[CheckpointRecord]:
        if self.every_n_hours is None or not records:
            return []
        kept = [records[0]]
        for record in records[1:]:
            if record.contents.time_s - kept[-1].contents.time_s >= 3600 * self.every_n_hours:
                kept.append(record)
        return kept

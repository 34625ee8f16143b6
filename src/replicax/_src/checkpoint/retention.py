"""Which checkpoints are kept: the newest, the best and some of each hour, by rules that do not know of one another."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from replicax._src.checkpoint.contents import Contents
from replicax._src.errors import InvalidArgumentError

BestFn = Callable[[Any], float]


@final
@dataclass(frozen=True)
class Record:
    """A checkpoint of a directory.

    Attributes:
      path: Of it.
      contents: What it says of itself.
    """

    path: str
    contents: Contents


def _is_whole(value: object, *, at_least: int) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool) and int(value) >= at_least


@final
@dataclass(frozen=True)
class Retention:
    """What is kept. A checkpoint that any of the rules wants stays.

    Attributes:
      max_to_keep: So many of the newest; None: all.
      keep_best: So many of the best, of those that were saved with metrics.
      best_fn: From the metrics of a checkpoint to the number by which it is judged.
      best_mode: "max" or "min".
      every_n_hours: And one for each so many hours.

    Raises:
      InvalidArgumentError: Numbers that are too small, another mode, or best ones without a ``best_fn``.
    """

    max_to_keep: int | None = 5
    keep_best: int = 0
    best_fn: BestFn | None = None
    best_mode: str = "max"
    every_n_hours: float | None = None

    def __post_init__(self) -> None:
        if self.max_to_keep is not None and not _is_whole(self.max_to_keep, at_least=1):
            raise InvalidArgumentError(
                f"max_to_keep is a whole number of at least 1, or None for all; got {self.max_to_keep!r}."
            )
        if self.best_mode not in ("max", "min"):
            raise InvalidArgumentError(f"best_mode is 'max' or 'min'; got {self.best_mode!r}.")
        if self.best_fn is not None and not callable(self.best_fn):
            raise InvalidArgumentError(
                f"best_fn is a function of the metrics, such as lambda metrics: metrics['loss']; got {self.best_fn!r}."
            )
        if not _is_whole(self.keep_best, at_least=0) or (self.keep_best and self.best_fn is None):
            raise InvalidArgumentError(
                f"keep_best={self.keep_best!r} needs best_fn, which says how good a checkpoint is: "
                "best_fn=lambda metrics: metrics['accuracy']. It is a whole number, 0 or more."
            )
        hours = self.every_n_hours
        if hours is not None and not (isinstance(hours, numbers.Real) and hours > 0):
            raise InvalidArgumentError(
                f"keep_checkpoint_every_n_hours is positive, or None; got {self.every_n_hours!r}."
            )

    def by_quality(self, records: Sequence[Record]) -> list[Record]:
        """Those with metrics, the best first; of equal ones the newer. What has no number (NaN) comes last."""
        if self.best_fn is None:
            return []
        sign = 1.0 if self.best_mode == "max" else -1.0

        def quality(record: Record) -> tuple[bool, float, int]:
            value = sign * self._judge_earlier(record.contents.metrics)
            is_number = not math.isnan(value)
            return is_number, value if is_number else 0.0, record.contents.order

        return sorted((r for r in records if r.contents.metrics is not None), key=quality, reverse=True)

    def check(self, metrics: Mapping[str, float]) -> None:
        """Makes sure that these can be judged, before anything is saved with them.

        Raises:
          InvalidArgumentError: ``best_fn`` raises an error, or gives no number.
        """
        if self.best_fn is None:
            return
        try:
            float(self.best_fn(metrics))
        except Exception as error:
            raise InvalidArgumentError(
                f"best_fn cannot judge the metrics {dict(metrics)!r:.200} ({type(error).__name__}: {error}). It gives a number for the "
                "metrics of each save that has some; leave metrics out where a checkpoint is not to be judged."
            ) from error

    def _judge_earlier(self, metrics: Any) -> float:
        """Of a checkpoint that is there, perhaps of a program that had other metrics: then no number."""
        assert self.best_fn is not None
        try:
            return float(self.best_fn(metrics))
        except Exception:
            return math.nan

    def to_remove(self, records: Sequence[Record]) -> list[Record]:
        """Those that no rule wants.

        Args:
          records: Oldest first.
        """
        if self.max_to_keep is None:
            return []
        kept = {r.path for r in records[-self.max_to_keep :]}
        kept |= {r.path for r in self.by_quality(records)[: self.keep_best]}
        kept |= {r.path for r in self._of_hours(records)}
        return [r for r in records if r.path not in kept]

    def _of_hours(self, records: Sequence[Record]) -> list[Record]:
        if self.every_n_hours is None or not records:
            return []
        kept = [records[0]]
        for record in records[1:]:
            if record.contents.time_s - kept[-1].contents.time_s >= 3600 * self.every_n_hours:
                kept.append(record)
        return kept

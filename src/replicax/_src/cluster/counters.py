"""What this process has done: plain attributes, to which a step adds without a call. ``figures.py`` reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from replicax._src.cluster.loop_progress import LoopProgress

_LOSSES: Final = ("loss", "train/loss")


@final
class Span:
    """The total time of something that begins and ends. One thread writes it, others may read it."""

    def __init__(self) -> None:
        # The total, and the beginning if it has not ended: one object, because another thread may read them.
        self._state: tuple[float, float | None] = 0.0, None

    def begin(self) -> None:
        self._state = self._state[0], time.monotonic()

    def end(self) -> None:
        self._state = self.total_s, None

    @property
    def total_s(self) -> float:
        """The time so far, up to now if it has begun and not ended."""
        total_s, since = self._state
        return total_s if since is None else total_s + time.monotonic() - since


@final
class Counters:
    """The counts of this process.

    Attributes:
      num_runs: The number of times that a function was run on the replicas.
      num_batches: The number of batches that loops have taken from datasets.
      num_examples: The number of their rows, on the replicas of this process.
      loss: The loss that was logged last: a number or an array, perhaps of a step that has not ended.
      logs: What the last training step of a ``fit`` logged, by name; values as ``loss``.
      epoch_logs: What the last epoch of a ``fit`` logged, with its validation.
      known: The last known values of the loss (``""``) and of each name in the logs.
      strategy: The name of the strategy that was made last.
      survivors: A function that describes the live workers of a strategy that tolerates failures; see ``job_figures``.
        Any thread may call it. None without such a strategy.
      groups: A function that describes groups that train alone and exchange; see ``status/group_table.py``. Any
        thread may call it. None without groups.
      fit: The position of the running ``fit``; None outside of every ``fit``.
      passes: The position of the loop over distributed datasets that is shown; see ``begin_pass``.
      programs: The time in programs that several processes run together. It includes waits for other processes.
      agreements: The time in which a thread that reads ahead waits for the batches of other processes.
    """

    def __init__(self) -> None:
        self.num_runs = self.num_batches = self.num_examples = 0
        self.loss: Any = None
        self.logs: Mapping[str, Any] = {}
        self.epoch_logs: Mapping[str, Any] = {}
        self.known: dict[str, float | str] = {}
        self.strategy: str | None = None
        self.survivors: Callable[[], Mapping[str, Any]] | None = None
        self.groups: Callable[[], Mapping[str, Any]] | None = None
        self.fit: LoopProgress | None = None
        self.passes: LoopProgress | None = None
        self.programs, self.agreements = Span(), Span()
        self._reading = Span()
        # The total of ``agreements`` when the loop began to wait; None: it does not wait.
        self._agreed_s: float | None = None
        self._of_others_s = 0.0

    def note_scalar(self, name: str, value: Any) -> None:
        """Notes a number that is logged, if its name says that it is the loss."""
        if name in _LOSSES:
            self.loss = value

    def note_logs(self, logs: Mapping[str, Any], num_batches: int) -> None:
        """Notes the logs of training steps of a Keras model, which are those of the last step."""
        self.loss, self.logs = logs.get("loss", self.loss), logs
        if self.fit is not None:
            self.fit.note(num_batches)

    def begin_pass(self, progress: LoopProgress) -> None:
        """Notes that a loop over a distributed dataset begins a pass. It is shown from now on, unless the pass
        that is shown is longer: the shorter pass is a validation.
        """
        shown, new = self.passes, progress.num_batches
        is_longer = shown is not None and shown.num_batches is not None and new is not None
        if not (is_longer and shown.num_batches > new):  # type: ignore[union-attr, operator]
            self.passes = progress

    def begin_reading(self) -> None:
        """Notes that a loop asks for a batch."""
        self._agreed_s = self.agreements.total_s
        self._reading.begin()

    def end_reading(self) -> None:
        """Notes that the loop has got it, or an error."""
        self._of_others_s, self._agreed_s = self.waited_for_others_s, None
        self._reading.end()

    @property
    def waited_for_others_s(self) -> float:
        """The time for which loops have waited for a batch because another process did not have its own."""
        since = self._agreed_s
        return self._of_others_s + (0.0 if since is None else self.agreements.total_s - since)

    @property
    def waited_for_data_s(self) -> float:
        """The time for which loops have waited for the data of this process."""
        return max(0.0, self._reading.total_s - self.waited_for_others_s)


counters: Final = Counters()

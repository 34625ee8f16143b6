"""``rx.CheckpointManager``: the checkpoints of one program in one directory: saved while it goes on, kept by rules.

The public interface, as TensorFlow's ``tf.train.CheckpointManager``::

    manager = rx.CheckpointManager(checkpoint, "training", max_to_keep=3)
    manager.restore_or_initialize()     # -> the path of the newest that is whole, or None
    path = manager.save()               # -> ".../training/ckpt-7"; returns when the copy is taken
    manager.save(checkpoint_number=step, metrics={"accuracy": 0.9})
    manager.wait()                      # until it is on the disk; raises what went wrong
    manager.latest_checkpoint, manager.best_checkpoint, manager.checkpoints
    manager.close()                     # waits; also the end of a `with`

In a cluster every process makes the same calls.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, final

import numpy as np

from replicax._src.checkpoint import processes
from replicax._src.checkpoint.background import Background
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.contents import Contents
from replicax._src.checkpoint.directory import paths_in, records_in
from replicax._src.checkpoint.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
)
from replicax._src.checkpoint.orbax_files import orbax
from replicax._src.checkpoint.retention import BestFn, Record, Retention
from replicax._src.checkpoint.saved import SavedCheckpoint
from replicax._src.checkpoint.status import LoadStatus
from replicax._src.checkpoint.writing import clean, probe, remove
from replicax._src.errors import InvalidArgumentError
from replicax._src.options import path_of

log = logging.getLogger("replicax")
_MOST_LOOKS = 10  # for checkpoints in place of those that another program has removed meanwhile


@final
class CheckpointManager:
    """Saves checkpoints of one program into a directory, keeps some, and restores the newest that is whole.

    ``save`` copies the state to the host, and a thread writes it: that copy is all for which training waits. Every
    process of a cluster makes it and calls the same methods; the chief writes. Making it creates the directory, finds
    out whether it can be written to and whether all processes see it, and removes what a writer that was killed has
    left.

    Args:
      checkpoint: What is saved.
      directory: Of the checkpoints, which all processes share. A process that is given another one than the chief, as
        in programs of TensorFlow, takes the chief's, and makes its own as an empty directory.
      max_to_keep: How many of the newest are kept; None: all.
      keep_checkpoint_every_n_hours: One for each so many hours is kept too.
      checkpoint_name: Their names begin with it.
      step_counter: A variable or a function that gives the step; ``checkpoint_interval`` counts by it.
      checkpoint_interval: ``save`` does nothing before so many steps have passed since the last one.
      init_fn: Called by ``restore_or_initialize`` where there is no checkpoint.
      keep_best: How many of the best are kept besides the newest; they are judged by ``best_fn``.
      best_fn: From the ``metrics`` of a ``save`` to a number.
      best_mode: Whether the largest number is best, "max", or the smallest, "min".
      asynchronous: ``save`` returns when the copy is taken; else when it is on the disk.

    Raises:
      CheckpointWriteError: The directory cannot be made or written to.
      UnsharedDirectoryError: Processes see different directories.
      InvalidArgumentError: Numbers that have no meaning, or a ``checkpoint_name`` that is a path.
      MissingExtraError: orbax is not installed.

    Source: TensorFlow, ``tf.train.CheckpointManager``.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 5,
        keep_checkpoint_every_n_hours: float | None = None,
        checkpoint_name: str = "ckpt",
        step_counter: Any = None,
        checkpoint_interval: int | None = None,
        init_fn: Callable[[], Any] | None = None,
        *,
        keep_best: int = 0,
        best_fn: BestFn | None = None,
        best_mode: str = "max",
        asynchronous: bool = True,
    ):
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(
                f"CheckpointManager takes an rx.Checkpoint, got {type(checkpoint).__name__}."
            )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError("`step_counter` should be passed if `checkpoint_interval` is set.")
        if checkpoint_interval is not None and not checkpoint_interval > 0:
            raise InvalidArgumentError(
                f"checkpoint_interval is a number of steps of at least 1, or None; got {checkpoint_interval!r}."
            )
        if not checkpoint_name or os.path.basename(checkpoint_name) != checkpoint_name:
            raise InvalidArgumentError(
                f"checkpoint_name is the beginning of a name, such as 'ckpt', and no path; got {checkpoint_name!r}."
            )
        if init_fn is not None and not callable(init_fn):
            raise InvalidArgumentError(
                f"init_fn is a function without arguments, or None; got {init_fn!r:.200}."
            )
        self._retention = Retention(max_to_keep, keep_best, best_fn, best_mode, keep_checkpoint_every_n_hours)
        self._checkpoint, self._name, self._init_fn = checkpoint, checkpoint_name, init_fn
        self._given_directory = os.path.abspath(path_of(directory, "directory", "training"))
        self._directory = self._given_directory  # until all have agreed on the chief's
        self._step_counter, self._interval = step_counter, checkpoint_interval
        self._last_step: int | None = None
        self._is_asynchronous = asynchronous
        self._being_written: str | None = None  # in all processes, until they have waited for it
        self._known: set[str] = set()  # that it has saved or restored
        self._statistics = {"num_saved": 0, "num_bytes": 0, "copy_s": 0.0, "write_s": 0.0}
        processes.wait_for_saves_together(self._directory)  # or cleaning would remove what they have written
        processes.together("opening the directory of checkpoints", self._open)
        self._directory = processes.shared_directory(self._given_directory)
        self._background = Background(self._directory)
        if self._given_directory != self._directory:
            log.info(
                "Checkpoints are in the chief's directory %s, not in %s.",
                self._directory,
                self._given_directory,
            )
            self._make_given_directory()

    def _make_given_directory(self) -> None:
        """Programs of TensorFlow remove what a worker that is not the chief has written to a directory of its own."""
        if self._given_directory != self._directory:
            os.makedirs(self._given_directory, exist_ok=True)

    def _open(self) -> None:
        orbax()  # here, and not in the pause of the first save: importing it takes half a second
        if processes.is_chief():
            probe(self._directory)
            for name in clean(self._directory):
                log.info("Removed %s, which a writer that was ended has left in %s.", name, self._directory)

    # --- what there is ------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """What is saved."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """Of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """How many steps pass between two, at least."""
        return self._interval

    def _records(self) -> list[Record]:
        return records_in(self._directory, self._name)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of those on the disk, oldest first. A save under way is waited for."""
        processes.wait_for_saves(self._directory)
        return [record.path for record in self._records()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the newest on the disk, or None. A save under way is waited for.

        Raises:
          CheckpointError: That save has failed.
        """
        processes.wait_for_saves(self._directory)
        records = self._records()
        return records[-1].path if records else None

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best on the disk by ``best_fn``, or None. A save under way is waited for."""
        processes.wait_for_saves(self._directory)
        best = self._retention.by_quality(self._records())
        return best[0].path if best else None

    # --- saving -------------------------------------------------------------------------------------------

    def save(
        self,
        checkpoint_number: Any = None,
        check_interval: bool = True,
        *,
        metrics: Mapping[str, Any] | None = None,
    ) -> str | None:
        """Saves a checkpoint. Every process calls it, between steps.

        Args:
          checkpoint_number: Stands in its name; default: counted. One of that number is replaced.
          check_interval: Whether ``checkpoint_interval`` counts.
          metrics: Numbers, by name, by which the best are found.

        Returns:
          The path at which it is, or will be when it is written; None if ``checkpoint_interval`` has not passed.

        Raises:
          CheckpointWriteError: It could not be written, or the one before could not, of which nobody had heard. The
            checkpoints that were there are as they were.
          InvalidArgumentError: Metrics that are no numbers or that ``best_fn`` cannot judge, or a number below 0.
            Nothing is saved.
        """
        step = self._step()
        self._make_given_directory()
        if check_interval and self._interval is not None and not self._is_due(step):
            return None
        judged = _judged(metrics, self._retention)
        number = (
            self._checkpoint.save_counter + 1 if checkpoint_number is None else _number(checkpoint_number)
        )
        self.wait()
        path = os.path.join(self._directory, f"{self._name}-{number}")
        records = self._records()
        self._tell_of_others(path, records)
        order = max((record.contents.order for record in records), default=0) + 1
        before = processes.identity(path)
        began = time.perf_counter()
        write = self._checkpoint.snapshot(path, number=number, order=order, metrics=judged)
        self._known.add(path)
        self._statistics["copy_s"] = time.perf_counter() - began
        self._checkpoint.save_counter = number
        self._last_step = step
        if not self._is_asynchronous:
            processes.write(f"writing {os.path.basename(path)}", lambda: self._write(write))
            return path
        self._being_written = f"writing {os.path.basename(path)}"
        if processes.is_chief():
            self._background.start(lambda: self._write(write))
        elif not processes.is_alone():
            self._background.follow(lambda: processes.follow_chief(path, f"{path}.part-", before))
        return path

    def _tell_of_others(self, path: str, records: Sequence[Record]) -> None:
        if (
            path not in self._known
            and any(record.path == path for record in records)
            and processes.is_chief()
        ):
            log.warning(
                "%r is replaced by another checkpoint, and this manager has neither saved nor restored it. To go on from it, call "
                "restore_or_initialize() before the first save. Two managers of one directory need a checkpoint_name each.",
                path,
            )

    def _write(self, write: Callable[[], Contents | None]) -> None:
        began = time.perf_counter()
        contents = write()
        if contents is None:
            return
        self._statistics["num_saved"] += 1
        self._statistics["num_bytes"] = contents.num_bytes
        self._statistics["write_s"] = time.perf_counter() - began
        in_use = self._checkpoint.path_in_use
        for record in self._retention.to_remove(self._records()):
            if record.path != in_use:
                remove(record.path)

    def _step(self) -> int | None:
        counter = self._step_counter
        step = counter() if callable(counter) else counter
        try:
            return None if step is None else int(np.asarray(step))
        except (TypeError, ValueError) as error:
            raise InvalidArgumentError(
                f"step_counter is a variable or a function that gives the number of the step; it gave {step!r:.200}."
            ) from error

    def _is_due(self, step: int | None) -> bool:
        assert step is not None
        assert self._interval is not None
        return self._last_step is None or step - self._last_step >= self._interval

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until what was saved is on the disk.

        Every process of a cluster calls it, and waits for the one that writes.

        Raises:
          CheckpointWriteError: It could not be written; ``CheckpointError`` in the processes that do not write.
          TimeoutError: It is still being written.
          ClusterFailureError: Another process is gone.
        """
        if self._being_written is None:
            return
        try:
            processes.wait_for_chief(self._being_written, self._background, timeout_s)
        except CheckpointError:
            self._heard()
            raise
        self._heard()

    def _heard(self) -> None:
        self._being_written = None
        if not processes.is_chief():
            self._background.forget()

    def sync(self) -> None:
        """As ``wait``, in TensorFlow's word."""
        self.wait()

    def close(self) -> None:
        """Waits for what this process writes, for no other one, and gives the memory of the copy back.

        May be called twice.
        """
        try:
            self._background.wait(follows=False)
        finally:
            self._checkpoint.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def statistics(self) -> dict[str, float]:
        """How many were saved, and of the last one its bytes and the seconds that copying and writing took."""
        return dict(self._statistics)

    # --- restoring ----------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restores the newest checkpoint that is whole. Every process calls it; all restore the same.

        One that is damaged is named in a warning, and left. Where there is none at all, ``init_fn`` is called. As in
        TensorFlow the program may have grown since: what the checkpoint lacks keeps its value, and is named in a
        warning.

        Returns:
          The path of the checkpoint; None if there is none.

        Raises:
          CorruptCheckpointError: There are some, and none of them is whole.
          CheckpointMismatchError: It is of another model: variables have other shapes or dtypes; or it lacks some, and
            has others that have no place here. Nothing was restored.
        """
        status = self._restore(is_strict=True)
        if status is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        return status.path

    def restore(self) -> LoadStatus | None:
        """As ``restore_or_initialize``, but what is on one side only is left, whatever it is: the status knows what.

        Returns:
          What ``Checkpoint.restore`` returns; None if there is no checkpoint.
        """
        return self._restore(is_strict=False)

    def _restore(self, *, is_strict: bool) -> LoadStatus | None:
        self.wait()
        processes.wait_for_saves_together(self._directory)
        saved, status = self._newest_whole(), None
        while saved is not None and status is None:
            try:
                status = processes.together(
                    f"restoring {os.path.basename(saved.path)}",
                    functools.partial(self._checkpoint.restore_saved, saved, is_strict=is_strict),
                )
            except CorruptCheckpointError:
                if not _was_removed(saved):
                    raise
                saved = self._newest_whole()
        if saved is None:
            return None
        self._checkpoint.save_counter = saved.contents.number
        self._known.add(saved.path)
        self._last_step = self._step()
        return status

    def _newest_whole(self, num_more: int = _MOST_LOOKS) -> SavedCheckpoint | None:
        damaged: list[str] = []
        was_removed = False
        candidates = processes.gather("which checkpoints there are", self._candidates())[0]
        for path in candidates:
            problem, saved = _whole(path)
            problems = [text for text in processes.gather("which checkpoint is whole", problem) if text]
            if not problems:
                if damaged:
                    log.warning("Restoring %s instead, the newest checkpoint that is whole.", path)
                return saved
            if num_more and processes.is_alone() and path not in paths_in(self._directory, self._name):
                was_removed = True  # by who saves there, for a newer one
                continue
            damaged.append(problems[0])
            log.warning("%s", problems[0])
        if was_removed:
            return self._newest_whole(num_more - 1)
        if damaged:
            raise CorruptCheckpointError(
                f"None of the {len(damaged)} checkpoint(s) in {self._directory!r} is whole. Move them away to begin anew. The newest: "
                f"{damaged[0]}"
            )
        return None

    def _candidates(self) -> list[str]:
        """The paths of all, newest first: those that do not even say what is in them too, by their numbers."""
        told = [record.path for record in reversed(self._records())]
        silent = [path for path in reversed(paths_in(self._directory, self._name)) if path not in told]
        return silent + told

    def __repr__(self) -> str:
        return f"CheckpointManager({self._directory!r}, {self._name!r}, {len(self._records())} checkpoint(s))"


def _whole(path: str) -> tuple[str | None, SavedCheckpoint | None]:
    """What is wrong with a checkpoint; if nothing is, the checkpoint."""
    processes.wait_for_chiefs(path)
    try:
        saved = SavedCheckpoint(path)
        saved.verify()
        return None, saved
    except (CorruptCheckpointError, CheckpointNotFoundError) as error:
        return str(error), None


def _was_removed(saved: SavedCheckpoint) -> bool:
    """Whether another program has removed or replaced it meanwhile: one that evaluates reads what one that trains keeps
    few of.
    """
    if not processes.is_alone():
        return False
    try:
        return SavedCheckpoint(saved.path).contents.to_text() != saved.contents.to_text()
    except (CorruptCheckpointError, CheckpointNotFoundError):
        return True


def _judged(metrics: Any, retention: Retention) -> dict[str, float] | None:
    """Metrics as they are saved, when it is known that they can be judged."""
    if metrics is None:
        return None
    try:
        plain = {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"metrics are numbers by name, such as {{'accuracy': 0.9}}; got {metrics!r:.200} ({error})."
        ) from error
    retention.check(plain)
    return plain


def _number(given: Any) -> int:
    try:
        number = int(given)
        if number != given and not isinstance(given, str):
            raise ValueError("it is no whole number")
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"checkpoint_number is an integer of at least 0; got {given!r:.200}."
        ) from error
    if number < 0:
        raise InvalidArgumentError(f"checkpoint_number is an integer of at least 0; got {number}.")
    return number

"""``rx.CheckpointManager``: the checkpoints of one program in one directory, saved while it runs, and kept by rules.

The public interface, as TensorFlow's ``tf.train.CheckpointManager``::

    manager = rx.CheckpointManager(checkpoint, "training", max_to_keep=3)
    manager.restore_or_initialize()     # -> the path of the latest intact one, or None
    path = manager.save()               # -> ".../training/ckpt-7"; returns when the copy is taken
    manager.save(checkpoint_number=step, metrics={"accuracy": 0.9})
    manager.wait()                      # until it is on the disk; raises a failure of the save
    manager.latest_checkpoint, manager.best_checkpoint, manager.checkpoints
    manager.close()                     # waits; also the end of a `with`

In a cluster every process makes the same calls.
"""

from __future__ import annotations

import functools
import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self, final

import numpy as np

from replicax._src.checkpoint import agreement
from replicax._src.checkpoint.admitting import StateOfChief, admitting_managers
from replicax._src.checkpoint.array_files import tensorstore
from replicax._src.checkpoint.background import Background
from replicax._src.checkpoint.boundary import Boundary
from replicax._src.checkpoint.boundary_keeper import BoundaryKeeper
from replicax._src.checkpoint.carried_values import to_json
from replicax._src.checkpoint.checkpoint import Checkpoint, CopiedState
from replicax._src.checkpoint.continuous_saves import ContinuousSaves, check_continuous
from replicax._src.checkpoint.directory import paths_in, records_in, warn_of_tensorflow
from replicax._src.checkpoint.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointWriteError,
    CorruptCheckpointError,
)
from replicax._src.checkpoint.load_status import LoadStatus
from replicax._src.checkpoint.local_tier import LocalTier
from replicax._src.checkpoint.retention import BestFn, CheckpointRecord, Retention
from replicax._src.checkpoint.saved import SavedCheckpoint, save_at
from replicax._src.checkpoint.writing import clean, probe, remove
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import path_of

log = logging.getLogger("replicax")
_MOST_LOOKS = 10  # attempts to replace candidates that another program has removed in the meantime


@final
class CheckpointManager:
    """Saves checkpoints of one program into a directory, keeps some, and restores the latest intact one.

    ``save`` copies the state to the host, and a thread writes it. Training waits only for the copy. Every process of a
    cluster makes a manager and calls the same methods, and writes what its devices hold. The constructor creates the
    directory, checks that it is writable and that all processes share it, and removes the leftovers of killed
    writers.

    Args:
      checkpoint: The checkpoint that saves the objects.
      directory: The directory of the checkpoints, which all processes share. A process with another directory than
        the chief, as in programs of TensorFlow, uses the chief's, and creates its own as an empty directory.
      max_to_keep: The number of latest checkpoints to keep; None for all.
      keep_checkpoint_every_n_hours: The hours for each of which one more checkpoint is kept.
      checkpoint_name: The beginning of the names of checkpoints.
      step_counter: A variable or a function that returns the step, for ``checkpoint_interval``.
      checkpoint_interval: The least number of steps between two saves; ``save`` does nothing before.
      init_fn: A function that ``restore_or_initialize`` calls if there is no checkpoint.
      keep_best: The number of best checkpoints by ``best_fn`` to keep besides the latest.
      best_fn: A function that returns a number for the ``metrics`` of a ``save``.
      best_mode: "max" if the largest number is best, or "min".
      asynchronous: True if ``save`` returns when the copy is taken; False if it returns when the checkpoint is on
        the disk.
      local_directory: A directory on each host's own disk, for more frequent saves: each process writes there all that
        its devices hold. ``restore_or_initialize`` takes the newest checkpoint that all processes have. Processes of
        one host may share it. The newest two are kept, and only restarts use them: the properties and the other rules
        are about ``directory``. If this disk is full, a log line says so, and training continues.
      local_every: The least number of steps between two saves, smaller than ``checkpoint_interval``. A local save is
        put off while an earlier one is still being written.
      save_on_failure: True if a death of another process of the cluster loses at most the step that it interrupted.
        Each call of ``save``, also one before the interval is over, is then a *boundary*: the manager keeps references
        to the arrays and copies of the Python state, programs do not overwrite them, and after a failure a surviving
        process saves the last boundary at once. This costs the memory of a second copy of the state. Call ``save``
        after each step. Without other processes, and with ``fault_tolerance``, it has no effect.
      continuous: True to save without an interval: call ``save`` after each step, and a save begins at the first call
        after the last one is on the disk. If the disk is full or read-only, one warning says so, training continues,
        and later saves try again. ``save(check_interval=False)`` saves the last step.

    Raises:
      CheckpointWriteError: The directory cannot be created or is not writable.
      UnsharedDirectoryError: The processes do not share the directory.
      InvalidArgumentError: A number is not allowed, ``checkpoint_name`` is a path, another manager of this process has
        ``save_on_failure``, or ``continuous`` is given with an interval.
      UnsupportedError: With ``save_on_failure``, the processes hold different parts of the state.
      MissingExtraError: tensorstore is not installed.

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
        local_directory: str | os.PathLike[str] | None = None,
        local_every: int | None = None,
        save_on_failure: bool = False,
        continuous: bool = False,
    ):
        if not isinstance(checkpoint, Checkpoint):
            raise InvalidArgumentError(
                f"CheckpointManager needs an rx.Checkpoint, got {type(checkpoint).__name__}."
            )
        check_continuous(
            continuous,
            {
                "checkpoint_interval": checkpoint_interval,
                "local_directory": local_directory,
                "local_every": local_every,
                "asynchronous": None if asynchronous else asynchronous,
            },
        )
        if checkpoint_interval is not None and step_counter is None:
            raise InvalidArgumentError("`step_counter` should be passed if `checkpoint_interval` is set.")
        if checkpoint_interval is not None and not checkpoint_interval > 0:
            raise InvalidArgumentError(
                f"checkpoint_interval must be a number of steps, at least 1, or None; got {checkpoint_interval!r}."
            )
        is_name = isinstance(checkpoint_name, str) and checkpoint_name != ""
        if not is_name or os.path.basename(checkpoint_name) != checkpoint_name or "\0" in checkpoint_name:
            raise InvalidArgumentError(
                "checkpoint_name must be the beginning of a name, such as 'ckpt', and not a path or a text with NUL; got "
                f"{checkpoint_name!r}."
            )
        if init_fn is not None and not callable(init_fn):
            raise InvalidArgumentError(
                f"init_fn must be a function without arguments, or None; got {init_fn!r:.200}."
            )
        self._retention = Retention(max_to_keep, keep_best, best_fn, best_mode, keep_checkpoint_every_n_hours)
        self._checkpoint, self._name, self._init_fn = checkpoint, checkpoint_name, init_fn
        self._given_directory = os.path.abspath(path_of(directory, "directory", "training"))
        self._directory = self._given_directory  # until all processes have agreed on the chief's
        self._step_counter, self._interval = step_counter, checkpoint_interval
        self._local: LocalTier | None = None
        if local_directory is not None:
            self._local = LocalTier(
                local_directory, local_every, self._given_directory, checkpoint_name, checkpoint_interval
            )
        elif local_every is not None:
            raise InvalidArgumentError("`local_directory` should be passed if `local_every` is set.")
        if not isinstance(save_on_failure, bool):
            raise InvalidArgumentError(
                f"save_on_failure must be True or False; got {save_on_failure!r:.200}."
            )
        self._last_step: int | None = None
        self._last_entry: int | None = None  # of a replacement, when all agreed on their counts
        self._is_behind = agreement.is_solo()  # until then the others may have saved more often
        self._carried: dict[str, Callable[[], Any]] = {}
        self._is_asynchronous = asynchronous
        self._saved_path: str | None = None  # of the save that the last boundary ended
        self._known: set[str] = set()  # checkpoints that it has saved or restored
        self._statistics = {"num_saved": 0, "num_bytes": 0, "copy_s": 0.0, "write_s": 0.0}
        agreement.together("opening the directory of checkpoints", self._open)
        self._directory = agreement.shared_directory(self._given_directory)
        self._background = Background(self._directory)
        self._continuous: ContinuousSaves | None = None
        if continuous:
            self._continuous = ContinuousSaves(lambda: self._background.wait(keeps_failure=True))
        if self._given_directory != self._directory:
            log.info(
                "Checkpoints go to the chief's directory %s, not to %s.",
                self._directory,
                self._given_directory,
            )
            self._make_given_directory()
        if self._local is not None:
            self._local.open(self._directory)
        self._keeper: BoundaryKeeper | None = None
        if save_on_failure:
            self._keeper = BoundaryKeeper(checkpoint, self._directory, self._write_boundary)
            self._keeper.open()
        if not paths_in(self._directory, self._name):  # otherwise it is prepared after a restore
            self._prepare_memory()

    def _prepare_memory(self) -> None:
        """Makes the first continuous save as short as the others. Other managers may never save."""
        if self._continuous is not None:
            self._checkpoint.prepare_memory()

    def _make_given_directory(self) -> None:
        """Creates the given directory, which TensorFlow programs remove as that of a worker that is not the chief."""
        if self._given_directory != self._directory:
            os.makedirs(self._given_directory, exist_ok=True)

    def _open(self) -> None:
        tensorstore()  # imported here, because the first save would block training for the time that it takes
        agreement.finish_saves(self._directory)  # otherwise cleaning would remove their files
        if agreement.is_chief():
            probe(self._directory)
            clean(self._directory, self._name)

    # --- properties ---------------------------------------------------------------------------------------

    @property
    def checkpoint(self) -> Checkpoint:
        """The checkpoint that saves the objects."""
        return self._checkpoint

    @property
    def directory(self) -> str:
        """The directory of the checkpoints."""
        return self._directory

    @property
    def checkpoint_interval(self) -> int | None:
        """The least number of steps between two saves."""
        return self._interval

    @property
    def saves_continuously(self) -> bool:
        """True if a save begins as soon as the last one is on the disk."""
        return self._continuous is not None

    @property
    def saves_on_failure(self) -> bool:
        """True if a failure of another process makes it save the last boundary."""
        return self._keeper is not None

    def _records(self) -> list[CheckpointRecord]:
        return records_in(self._directory, self._name)

    @property
    def checkpoints(self) -> list[str]:
        """The paths of the checkpoints on the disk, oldest first. Waits for a running save."""
        agreement.wait_for_saves(self._directory)
        return [record.path for record in self._records()]

    @property
    def latest_checkpoint(self) -> str | None:
        """The path of the latest checkpoint on the disk, or None. Waits for a running save.

        Raises:
          CheckpointError: That save has failed.
        """
        agreement.wait_for_saves(self._directory)
        records = self._records()
        if not records:
            warn_of_tensorflow(self._directory)
            return None
        return records[-1].path

    @property
    def best_checkpoint(self) -> str | None:
        """The path of the best checkpoint on the disk by ``best_fn``, or None. Waits for a running save."""
        agreement.wait_for_saves(self._directory)
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
          checkpoint_number: The number in its name; by default a count. A checkpoint of that number is replaced.
          check_interval: True to apply ``checkpoint_interval``, ``local_every`` and ``continuous``; False to save into
            ``directory``.
          metrics: Numbers, by name, for ``best_fn``.

        Returns:
          The path at which the checkpoint is, or will be when it is written; None if ``checkpoint_interval`` has not
          passed, and in the replacement of a dead worker before its first step. A path in ``local_directory`` if only
          ``local_every`` has passed. With ``continuous``, None while the last save is not on the disk, or if the disk
          is full.

        Raises:
          CheckpointWriteError: The checkpoint could not be written, or a failure of the previous save has not been
            raised yet.
            Earlier checkpoints are unchanged. With ``continuous``, only ``wait`` and ``close`` raise it.
          InvalidArgumentError: A metric is not a number, or ``best_fn`` cannot judge the metrics, or the number is
            below 0, or the processes save different objects (raised in all).
            Nothing is saved.
          UnsupportedError: With ``save_on_failure``, the processes hold different parts of the state.
          ClusterFailureError: With ``save_on_failure``, another process is lost.
        """
        if not self._takes_part():
            return None
        path = self._save_if_due(checkpoint_number, check_interval, metrics)
        self._admit()
        return path

    def save_alone(self, checkpoint_number: Any = None, **rules: Any) -> str | None:
        """Does the same as ``save``, but admits no replacement, because the process ends afterwards. Private."""
        rules = {"check_interval": True, "metrics": None, **rules}
        return self._save_if_due(checkpoint_number, **rules) if self._takes_part() else None

    def _save_if_due(
        self, checkpoint_number: Any, check_interval: bool, metrics: Mapping[str, Any] | None
    ) -> str | None:
        self._saved_path = None
        self._agree_on_counts()
        step = self._step()
        self._make_given_directory()
        if check_interval and not self._is_due(step):
            path = self._save_locally(step, checkpoint_number)
            self._mark(checkpoint_number)
            return path
        judged = _judged(metrics, self._retention)
        number = self._next_number(checkpoint_number)
        path = os.path.join(self._directory, f"{self._name}-{number}")
        if self._keeper is not None:  # first, because the rest fails if another process has failed
            self._keeper.mark(path, number, is_saved=True, replaced=save_at(path))
        self._background.wait()
        self._tell_of_others(path)
        began = time.perf_counter()
        copied = self._copied(path, number, judged)
        if copied is None:
            return None
        self._known.add(path)
        self._saved_path = path
        self._statistics["copy_s"] = time.perf_counter() - began
        self._last_step = step
        if self._local is not None:
            self._local.last_step = step
        continuous = self._continuous
        if continuous is None:
            self._start(number, lambda: self._write(copied))
        else:
            self._start(
                number, lambda: continuous.write(lambda: self._write(copied), copied.save, copied.moment)
            )
        return path

    def _copied(self, path: str, number: int, metrics: Mapping[str, float] | None) -> CopiedState | None:
        """Copies the state. Returns None if a continuous save fails at that."""
        if self._continuous is None:
            return self._checkpoint.snapshot(path, number=number, metrics=metrics)
        self._continuous.begin()
        try:
            return self._checkpoint.snapshot(path, number=number, metrics=metrics)
        except CheckpointWriteError as error:
            self._continuous.note_uncopied(error)
            return None

    def keep_boundaries(self) -> None:
        """Begins ``save_on_failure``, again if the manager was closed. Private; ``fit`` calls it."""
        if self._keeper is not None:
            self._keeper.open()

    def mark_boundary(self, checkpoint_number: Any = None) -> None:
        """Marks a boundary without a save: keeps the state for ``save_on_failure``, and admits replacements with fault
        tolerance. Otherwise it does nothing. Private; ``fit`` calls it.
        """
        if self._takes_part():
            self._saved_path = None
            self._mark(checkpoint_number)
            self._admit()

    def _mark(self, checkpoint_number: Any) -> None:
        if self._keeper is not None:
            number = self._next_number(checkpoint_number)
            path = os.path.join(self._directory, f"{self._name}-{number}")
            self._keeper.mark(path, number, is_saved=False)

    # --- replacements of dead processes ---------------------------------------------------------------------

    @property
    def has_boundaries(self) -> bool:
        """True if calls of ``mark_boundary`` have an effect. Private."""
        return self._keeper is not None or agreement.admission() is not None

    def carry(self, name: str, take: Callable[[], Any]) -> None:
        """Makes a value travel with the checkpoint to a replacement. Private; ``fit`` calls it.

        Args:
          name: Its name.
          take: Returns numbers, strings, arrays and collections of these.
        """
        self._carried[name] = take

    def carried(self, name: str) -> Any:
        """Returns such a value in a replacement that has got it; None elsewhere. Private."""
        admission = agreement.admission()
        state = None if admission is None else admitting_managers(admission).state_of_chief(admission)
        return state.carried.get(name) if state is not None and self._fits(state) else None

    def _takes_part(self) -> bool:
        """False in a replacement that has not taken part in a step yet: the others have saved what it would save."""
        if agreement.is_solo():
            return False
        self._use_directory(agreement.known_directory(self._given_directory))
        return True

    def _admit(self) -> None:
        """Admits the replacements that wait, if this process is the chief, and its replacements enter here."""
        admission = agreement.admission()
        if admission is None:
            return
        managers = admitting_managers(admission)
        if not managers.may_admit(self):
            return
        managers.forget_state()
        if not admission.is_asked:
            return
        try:
            self._background.wait(keeps_failure=True)
        except CheckpointError:  # the next save raises it in all processes
            return
        admission.admit(self._taken)

    def _taken(self) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Returns the whole state, for a replacement."""
        counter = self._checkpoint.save_counter
        path = self._saved_path or os.path.join(self._directory, f"{self._name}-{counter + 1}")
        checkpoint, arrays = self._checkpoint.in_memory(counter)
        more: list[np.ndarray] = []
        carried = {name: to_json(take(), more) for name, take in self._carried.items()}
        return {
            "giver": agreement.own_name(),
            "directory": self._directory,
            "name": self._name,
            "path": path,
            "checkpoint": checkpoint,
            "counts": self._counts(),
            "carried": carried,
            "directories": [list(each) for each in agreement.directories()],
        }, [*arrays, *more]

    def _counts(self) -> dict[str, Any]:
        """Returns the values by which this manager decides about later saves, as JSON."""
        local = None if self._local is None else self._local.last_step
        return {
            "counter": self._checkpoint.save_counter,
            "last_step": self._last_step,
            "local_step": local,
            "known": sorted(self._known),
            "continuous": None if self._continuous is None else self._continuous.counts(),
        }

    def _take_counts(self, counts: Mapping[str, Any]) -> None:
        self._checkpoint.save_counter = counts["counter"]
        self._last_step = counts["last_step"]
        self._known = set(counts["known"])
        if self._local is not None:
            self._local.last_step = counts["local_step"]
        if self._continuous is not None and counts["continuous"] is not None:
            self._continuous.take_counts(counts["continuous"])

    def _agree_on_counts(self) -> None:
        """Gives the counts of the others to replacements that have taken part since the last save.

        The others may have saved once more after they had given their state, and before the first step together.
        """
        entry = agreement.last_entry()
        if entry is None or entry == self._last_entry:
            return
        self._last_entry = entry
        if self._continuous is not None:  # its counts change when a save ends
            self._background.wait(keeps_failure=True)
        of_all = agreement.gather("counts", [self._is_behind, self._counts()])
        self._is_behind = False
        self._take_counts(next((counts for is_behind, counts in of_all if not is_behind), of_all[0][1]))

    def _fits(self, state: StateOfChief) -> bool:
        """True if the chief's manager is this one."""
        directory = agreement.known_directory(self._given_directory)
        return (state.directory, state.name) == (directory, self._name)

    def _enter(self, *, is_strict: bool) -> LoadStatus | None:
        """Restores the state of the chief in a replacement. Returns None in other processes, and in a replacement for a
        manager that does not save, if it has checkpoints.
        """
        admission = agreement.admission()
        if admission is None:
            return None
        managers = admitting_managers(admission)
        managers.note_restored(self)
        state = managers.state_of_chief(admission)
        if state is None:
            return None
        if not self._fits(state):
            if paths_in(self._directory, self._name):  # another one, which only restores
                return None
            raise CheckpointMismatchError(
                f"{agreement.own_name()} is a replacement, and restores checkpoints {self._name!r} of {self._given_directory!r}, "
                f"where there are none; {state.giver} trains with checkpoints {state.name!r} of {state.directory!r}. Start the "
                "replacement with the program, arguments and environment of the others."
            )
        self._use_directory(state.directory)
        try:
            status = self._checkpoint.restore_saved(state.saved, is_strict=is_strict)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(
                f"{agreement.own_name()} is a replacement, and gets its state from {state.giver}, whose program has other "
                f"objects. {error}"
            ) from error
        self._take_counts(state.counts)
        log.info("Got the state from the memory of %s.", state.giver)
        return status

    def _use_directory(self, directory: str) -> None:
        if directory != self._directory:
            self._directory = directory
            self._background = Background(directory)

    # --- the end of a save ----------------------------------------------------------------------------------

    def _write_boundary(self, boundary: Boundary) -> None:
        """Writes the state of a boundary, alone."""
        if boundary.is_saved and save_at(boundary.path) not in (None, boundary.replaced):
            return  # the regular save is complete
        boundary.write()
        self._remove_old()

    def _next_number(self, given: Any) -> int:
        return self._checkpoint.save_counter + 1 if given is None else _number(given)

    def _start(self, number: int, write: Callable[[], None]) -> None:
        self._checkpoint.save_counter = number
        if self._is_asynchronous:
            self._background.start(write)
        else:
            write()

    def _save_locally(self, step: int | None, checkpoint_number: Any) -> str | None:
        """Saves into the local directory, if it is due and no process is still writing."""
        local = self._local
        if local is None or step is None or not local.is_due(step):
            return None
        if any(agreement.gather("whether saves are running", self._background.is_running)):
            return None
        self.wait()
        number = self._next_number(checkpoint_number)
        write = local.snapshot(self._checkpoint, number)
        local.last_step = step
        if write is None:
            return None
        self._start(number, write)
        return local.path(number)

    def _tell_of_others(self, path: str) -> None:
        if (
            path not in self._known
            and agreement.is_chief()
            and any(one.path == path for one in self._records())
        ):
            log.warning(
                "Replacing the checkpoint %r, which this manager has neither saved nor restored. To continue "
                "from it, call restore_or_initialize() before the first save. Two managers of one directory "
                "need different checkpoint_names.",
                path,
            )

    def _write(self, write: CopiedState) -> None:
        began = time.perf_counter()
        self._statistics["num_bytes"] = write()
        self._statistics["num_saved"] += 1
        self._statistics["write_s"] = time.perf_counter() - began
        if agreement.is_chief():
            self._remove_old()

    def _remove_old(self) -> None:
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
                "step_counter must be a variable or a function that returns the number of the step; it "
                f"returned {step!r:.200}."
            ) from error

    def _is_due(self, step: int | None) -> bool:
        if self._continuous is not None:
            return self._continuous.pass_boundary()
        if self._interval is None:
            return True
        assert step is not None
        return self._last_step is None or step - self._last_step >= self._interval

    def wait(self, timeout_s: float | None = None) -> None:
        """Waits until the saved checkpoints are on the disk, with the parts of all processes.

        Raises:
          CheckpointWriteError: A checkpoint could not be written; raised in every process.
          TimeoutError: A checkpoint is still being written.
          ClusterFailureError: Another process is lost.
        """
        self._background.wait(timeout_s)
        if self._continuous is not None:
            self._continuous.raise_failure()

    def sync(self) -> None:
        """Does the same as ``wait``, under TensorFlow's name."""
        self.wait()

    def close(self) -> None:
        """Does the same as ``wait``, and frees the memory of the copy and the boundary. May be called twice.

        It ends ``save_on_failure``. A later ``save`` only saves, with one warning.
        """
        try:
            self.wait()
        finally:
            admission = agreement.admission()
            if admission is not None:
                admitting_managers(admission).drop(self)
            self._carried.clear()
            self._checkpoint.release()
            if self._keeper is not None:
                self._keeper.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def statistics(self) -> dict[str, float]:
        """Returns the number of saves, and for the last one its bytes and the seconds for copying and writing."""
        return dict(self._statistics)

    # --- restoring ----------------------------------------------------------------------------------------

    def restore_or_initialize(self) -> str | None:
        """Restores the latest intact checkpoint. Every process calls it, and all restore the same one.

        A damaged checkpoint is skipped with a warning. If there is no checkpoint, it calls ``init_fn``. As in
        TensorFlow the program may have more variables than the checkpoint: these keep their values, with a warning.

        With ``fault_tolerance``, the replacement of a dead worker enters here: it waits for the end of the chief's next
        ``save``, and gets the state from its memory. The manager that has restored and saves admits replacements.

        Returns:
          The path of the checkpoint; None if there is none. In a replacement, the path that a checkpoint of its state
          has or would have.

        Raises:
          CorruptCheckpointError: There are checkpoints, but none is intact.
          CheckpointMismatchError: The checkpoint belongs to another model: variables have other shapes or dtypes,
            or it lacks some and has others that the program lacks. Nothing was restored. Or the directory,
            ``checkpoint_name`` or objects of a replacement are not those of the others.
          SystemExit: The others have finished, so that this replacement is not needed.
        """
        status = self._restore(is_strict=True)
        if status is None:
            if self._init_fn is not None:
                self._init_fn()
            return None
        return status.path

    def restore(self) -> LoadStatus | None:
        """Does the same as ``restore_or_initialize``, but accepts values that are on one side only. The status lists
        them.

        Returns:
          The result of ``Checkpoint.restore``; None if there is no checkpoint.

        Raises:
          CorruptCheckpointError: There are checkpoints, but none is intact.
          CheckpointMismatchError: See ``Checkpoint.restore``.
        """
        return self._restore(is_strict=False)

    def _restore(self, *, is_strict: bool) -> LoadStatus | None:
        status = self._enter(is_strict=is_strict)
        if status is None:
            status = self._restore_latest(is_strict=is_strict)
        self._prepare_memory()
        return status

    def _restore_latest(self, *, is_strict: bool) -> LoadStatus | None:
        agreement.together("waiting for saves", lambda: agreement.finish_saves(self._directory))
        damaged: list[str] = []
        candidates = self._candidates()
        num_looks = 0
        while candidates:
            path, saved = candidates.pop(0), None
            try:
                saved = agreement.together("opening a checkpoint", functools.partial(_opened, path))
                status = self._checkpoint.restore_saved(saved, is_strict=is_strict)
            except (CorruptCheckpointError, CheckpointNotFoundError) as error:
                if num_looks < _MOST_LOOKS and self._was_removed(path, saved):
                    num_looks, damaged, candidates = num_looks + 1, [], self._candidates()
                    continue
                damaged.append(str(error))
                log.warning("%s", error)
                continue
            if damaged:
                log.warning("Restored %s instead, the latest intact checkpoint.", path)
            self._checkpoint.save_counter = saved.contents.number
            self._known.add(path)
            step = self._step()
            # After a restart from a local checkpoint, the next save goes to the shared directory.
            self._last_step = step if os.path.dirname(path) == self._directory else None
            if self._local is not None:
                self._local.last_step = step
            return status
        if damaged:
            raise CorruptCheckpointError(
                f"None of the {len(damaged)} checkpoint(s) in {self._directory!r} is intact. Move them away "
                f"to start without one. The latest: {damaged[0]}"
            )
        return None

    def _was_removed(self, path: str, saved: SavedCheckpoint | None) -> bool:
        """True if another program has removed or replaced a checkpoint in the meantime. An evaluator reads what a
        trainer keeps only briefly.
        """
        if not agreement.is_alone():
            return False
        if path not in paths_in(os.path.dirname(path), self._name):
            return True
        try:
            return saved is not None and SavedCheckpoint(path).contents.save != saved.contents.save
        except (CorruptCheckpointError, CheckpointNotFoundError):
            return False

    def _candidates(self) -> list[str]:
        """Returns the paths that the chief sees and the local ones that all processes have, latest first.

        Checkpoints without a readable manifest come first, by their numbers.
        """
        told = [(record.path, record.contents.time_s) for record in reversed(self._records())]
        paths = [path for path, _ in told]
        silent = [path for path in reversed(paths_in(self._directory, self._name)) if path not in paths]
        silent, told = agreement.gather("which checkpoints there are", [silent, told])[0]
        if self._local is not None:
            local = self._local.common(told[0][1] if told else 0.0)
            told = sorted([*told, *local], key=lambda one: -one[1]) if local else told
        return silent + [path for path, _ in told]

    def __repr__(self) -> str:
        return f"CheckpointManager({self._directory!r}, {self._name!r}, {len(self._records())} checkpoint(s))"


def _opened(path: str) -> SavedCheckpoint:
    agreement.wait_for_chiefs(path)
    return SavedCheckpoint(path)


def _judged(metrics: Any, retention: Retention) -> dict[str, float] | None:
    """Returns the metrics as they are saved, after checking that they can be judged."""
    if metrics is None:
        return None
    try:
        plain = {str(name): float(value) for name, value in metrics.items()}
    except (AttributeError, TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"metrics must be numbers by name, such as {{'accuracy': 0.9}}; got {metrics!r:.200} ({error})."
        ) from error
    retention.check(plain)
    return plain


def _number(given: Any) -> int:
    try:
        number = int(given)
        if number != given and not isinstance(given, str):
            raise ValueError("it is not a whole number")
    except (TypeError, ValueError) as error:
        raise InvalidArgumentError(
            f"checkpoint_number must be an integer, at least 0; got {given!r:.200}."
        ) from error
    if number < 0:
        raise InvalidArgumentError(f"checkpoint_number must be an integer, at least 0; got {number}.")
    return number

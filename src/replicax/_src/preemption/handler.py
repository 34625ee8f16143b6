"""``PreemptionCheckpointHandler``: saves and ends a training when one of its machines is taken away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, final

from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.preemption import unfinished
from replicax._src.preemption.guarded_steps import GuardedSteps
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.scope import program_guard
from replicax._src.tracing.capture import current_capture
from replicax._src.vocabulary.errors import ContextError, InvalidArgumentError


@final
class PreemptionCheckpointHandler:
    """Saves at the same step in all tasks when one of them gets SIGTERM, then ends all with exit code 42.

    A restarted job resumes from there, because the handler restores the newest checkpoint when it is created.
    ``replicax launch`` restarts the job automatically. Create the handler in the main thread of every task, after the
    strategy and the objects to save. Every task must call ``run`` equally often. With parameter servers the coordinator
    creates it, and saves when all scheduled functions have finished. SIGTERM is detected within milliseconds, and
    handled before the next ``run``. In a worker of Ray Train it watches for Ray's signal that the node is taken away
    instead, and may be created in any thread.

    Args:
      cluster_resolver: The resolver of the strategy; None if it has none.
      checkpoint_or_checkpoint_manager: The state to save. The number of ``run`` calls is saved with it as
        ``checkpointed_runs``.
      checkpoint_dir: The directory for a ``Checkpoint``; only the newest is kept. A ``CheckpointManager`` has its own.
      termination_config: Overrides of the default behaviour.

    Raises:
      InvalidArgumentError: The state to save or the directory is missing.
      ContextError: This is not the main thread, or the strategy of the cluster does not exist yet.
      ClusterFailureError: Another task is gone.

    Source: TensorFlow, ``tf.distribute.experimental.PreemptionCheckpointHandler``.

    >>> import replicax as rx, tempfile
    >>> strategy = rx.OneDeviceStrategy("cpu:0")
    >>> with strategy.scope():
    ...     v = rx.Variable(0.0)
    >>> handler = rx.experimental.PreemptionCheckpointHandler(None, rx.Checkpoint(v=v), tempfile.mkdtemp())
    >>> for _ in range(handler.total_run_calls, 5):
    ...     _ = handler.run(strategy.run, lambda: v.assign_add(1.0))
    >>> handler.total_run_calls, float(v)
    (5, 5.0)
    >>> handler.close()
    """

    def __init__(
        self,
        cluster_resolver: ClusterResolver | None,
        checkpoint_or_checkpoint_manager: Checkpoint | CheckpointManager,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        termination_config: TerminationConfig | None = None,
    ):
        config = TerminationConfig() if termination_config is None else termination_config
        if not isinstance(config, TerminationConfig):
            raise InvalidArgumentError(
                f"termination_config must be an rx.experimental.TerminationConfig, got {config!r}."
            )
        self._save_fn = config.save_fn
        self._manager = _manager_of(checkpoint_or_checkpoint_manager, checkpoint_dir)
        self._peers = _peers_of(cluster_resolver)
        self._num_calls = self._restored_calls()
        self._saved_at = self._num_calls if self._manager.latest_checkpoint else None
        self._is_inside = False
        self._steps = GuardedSteps(self._peers, config)

    @property
    def total_run_calls(self) -> int:
        """The number of calls of ``run`` or ``save_checkpoint_if_preempted``, including those of earlier runs of the
        job.

        It says where to resume: for example in epoch ``total_run_calls // steps_per_epoch``.
        """
        return self._num_calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a training step. If a task is preempted, all tasks save before the step.

        Call it in cross-replica context, equally often in every task. Change saved state only inside the function: a
        save between two calls then never splits a step. If a distributed iterator was read since the last call, as in
        ``handler.run(step, next(iterator))``, the step runs with that batch before the save.

        Args:
          distributed_train_function: The step. It usually calls ``strategy.run``.
          *args: The arguments of the function.
          **kwargs: The keyword arguments of the function.

        Returns:
          The result of the function.

        Raises:
          SystemExit: All tasks have saved, and end.
          ClusterFailureError: Another task is gone.
          CheckpointError: The checkpoint could not be saved.
          Exception: The error of the function, or of the ``termination_watcher_fn``.
        """
        if not callable(distributed_train_function):
            raise InvalidArgumentError(
                f"handler.run takes the function of a step and its arguments, handler.run(train_step, batch); got "
                f"{distributed_train_function!r:.200}. If the step is not a function, call save_checkpoint_if_preempted() after it."
            )
        with self._step():
            result = distributed_train_function(*args, **kwargs)
            self._num_calls += 1
        self._mark()
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """Ends a step, and saves now if a task is preempted. Use it in place of ``run`` if the step is not a function.

        Call it after each step in all tasks. ``total_run_calls`` counts these calls too.

        Args:
          *args: The arguments of the manager's ``save``, or of the ``save_fn``.
          **kwargs: The keyword arguments of the same.

        It raises the same errors as ``run``.
        """
        self._num_calls += 1
        self._mark()
        self._steps.end_and_save(lambda: self._write(*args, **kwargs))

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Lets all tasks save and end before any call of ``strategy.run``, ``run_steps`` or an ``rx.function`` in the
        block.

        Use it instead of ``run`` in loops whose progress follows from the saved state alone, such as ``while step <
        100: train_step(iterator)``, where ``train_step`` increments ``step``. ``total_run_calls`` does not count these
        calls.
        """
        with program_guard.guarding(self._around_program):
            yield

    def close(self) -> None:
        """Stops watching: SIGTERM has its former effect again. Call it in the main thread, or use the handler in
        ``with``.
        """
        self._steps.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Wraps a step. If all tasks must save, saves before the step, or after it if its data was read already."""
        while has_to_save := self._steps.begin():
            if self._steps.must_run_first():
                break
            self._save()
        self._is_inside = True
        try:
            yield
        finally:
            self._is_inside = False
        self._steps.end()
        if has_to_save:
            self._save()

    @contextlib.contextmanager
    def _around_program(self) -> Iterator[None]:
        if self._is_inside or current_capture() is not None:
            yield
            return
        with self._step():
            yield
            self._saved_at = None
        self._mark()

    def _mark(self) -> None:
        """Marks a boundary, at which the manager keeps the state (``save_on_failure``) or admits replacements."""
        if self._manager.has_boundaries:
            self._manager.checkpoint.checkpointed_runs = self._num_calls
            self._manager.mark_boundary()

    def _save(self) -> None:
        self._steps.save(self._write)

    def _write(self, *args: Any, **kwargs: Any) -> None:
        unfinished.join_all()
        if self._save_fn is not None:
            self._save_fn(*args, **kwargs)
        elif self._saved_at != self._num_calls:
            self._manager.checkpoint.checkpointed_runs = self._num_calls
            if len(args) < 2:  # otherwise the caller has chosen
                kwargs.setdefault("check_interval", False)
            self._manager.save_alone(*args, **kwargs)
            self._manager.wait()
        self._saved_at = self._num_calls

    def _restored_calls(self) -> int:
        """Restores the newest checkpoint, if there is one. Returns how often ``run`` was called before it."""
        checkpoint = self._manager.checkpoint
        vars(checkpoint).pop(
            "checkpointed_runs", None
        )  # a checkpoint of a program without a handler lacks it
        self._manager.restore_or_initialize()
        checkpoint.checkpointed_runs = 0  # the deferred restore replaces it
        num_calls = int(vars(checkpoint)["checkpointed_runs"])
        if self._peers is None:
            return num_calls
        of_all = self._peers.gather(
            "preemption: run calls", num_calls, "to make a PreemptionCheckpointHandler"
        )
        if len(set(of_all)) > 1:
            restored = ", ".join(f"{calls} on {name}" for name, calls in of_all.named())
            raise InvalidArgumentError(
                f"The tasks restored different numbers of run calls: {restored}. All tasks must share the directory "
                f"{self._manager.directory!r}."
            )
        return num_calls


def _manager_of(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if checkpoint_dir is not None and os.path.abspath(checkpoint_dir) != os.path.abspath(given.directory):
            raise InvalidArgumentError(
                f"checkpoint_dir is {os.fspath(checkpoint_dir)!r}, but the CheckpointManager saves to {str(given.directory)!r}. "
                "Leave checkpoint_dir out."
            )
        return given
    if not isinstance(given, Checkpoint):
        raise InvalidArgumentError(
            f"PreemptionCheckpointHandler takes an rx.Checkpoint or an rx.CheckpointManager, got {given!r:.200}."
        )
    if checkpoint_dir is None:
        raise InvalidArgumentError(
            "PreemptionCheckpointHandler needs `checkpoint_dir` with an rx.Checkpoint: a directory that all tasks share. Or pass "
            "an rx.CheckpointManager."
        )
    return CheckpointManager(given, checkpoint_dir, max_to_keep=1)


def _peers_of(resolver: ClusterResolver | None) -> Peers | None:
    """Returns the tasks that take the same steps as this one."""
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver must be strategy.cluster_resolver, or one of rx.cluster_resolver; got {resolver!r:.200}."
        )
    spec = None if resolver is None else resolver.cluster_spec()
    if resolver is None or not spec:
        return None
    membership = Membership.of(spec, resolver.task_type, resolver.task_id)
    if "ps" in spec.jobs or len(membership.workers) < 2:
        return None
    peers = joined_peers()
    if peers is None:
        raise ContextError(
            "PreemptionCheckpointHandler: this process has not joined its cluster yet. Create the MultiWorkerMirroredStrategy first, "
            "in all tasks."
        )
    return peers

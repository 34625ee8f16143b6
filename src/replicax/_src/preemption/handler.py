"""``PreemptionCheckpointHandler``: a training that saves and ends when one of its machines is to be taken away."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, final

from replicax._src import program_guard
from replicax._src.checkpoint.checkpoint import Checkpoint
from replicax._src.checkpoint.manager import CheckpointManager
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers, joined_peers
from replicax._src.cluster.resolver import ClusterResolver
from replicax._src.errors import ContextError, InvalidArgumentError
from replicax._src.parameter_servers.coordinator.cluster_coordinator import coordinators_at_work
from replicax._src.preemption.steps import GuardedSteps
from replicax._src.preemption.termination import TerminationConfig
from replicax._src.tracing.capture import current_capture


@final
class PreemptionCheckpointHandler:
    """Saves when a task of the cluster is to end (SIGTERM), at the same step in all tasks, and ends them with exit code
    42.

    Start the job again, as ``replicax launch`` does by itself, and it goes on from there: the handler restores the
    newest checkpoint when it is made. Make it in every task, in the main thread, after the strategy and what is saved;
    call ``run`` as often in every task. With parameter servers it belongs to the coordinator, and saves when all that
    was scheduled has ended. SIGTERM is noticed within milliseconds whatever the task does, and acted on before the next
    ``run``.

    Args:
      cluster_resolver: Of the strategy; None where it has none.
      checkpoint_or_checkpoint_manager: What is saved. The number of ``run`` calls is saved with it, as
        ``checkpointed_runs``.
      checkpoint_dir: Where; with a ``Checkpoint`` only, of which the newest is kept.
      termination_config: What is done otherwise than by default.

    Raises:
      InvalidArgumentError: There is nothing to save, or nowhere.
      ContextError: This is not the main thread; or the strategy of the cluster has not been made yet.
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
                f"termination_config is an rx.experimental.TerminationConfig, got {config!r}."
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
        """How often ``run`` was called, or ``save_checkpoint_if_preempted``, also in the runs of the job before this
        one.

        It says where to go on: epoch ``total_run_calls // steps_per_epoch``, say.
        """
        return self._num_calls

    def run(self, distributed_train_function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a step of the training, with its programs; if all are to save, saves before it.

        Cross-replica context, all tasks, as often in each. All that happens between two calls is saved, or done again,
        as a whole only if it is a part of neither: put what changes saved state into the function. If a distributed
        iterator has been read since the last call (``handler.run(step, next(iterator))``) the step is run with that,
        and then saved.

        Args:
          distributed_train_function: Usually calls ``strategy.run``.
          *args: For it.
          **kwargs: For it.

        Returns:
          What it returns.

        Raises:
          SystemExit: All have saved, and end.
          ClusterFailureError: Another task is gone.
          CheckpointError: It could not be saved.
          Exception: What the function raises, or a ``termination_watcher_fn`` has raised.
        """
        if not callable(distributed_train_function):
            raise InvalidArgumentError(
                f"handler.run takes the function of a step and its arguments, handler.run(train_step, batch); got "
                f"{distributed_train_function!r:.200}. Where a step is no function, call save_checkpoint_if_preempted() after it."
            )
        with self._step():
            result = distributed_train_function(*args, **kwargs)
            self._num_calls += 1
        return result

    def save_checkpoint_if_preempted(self, *args: Any, **kwargs: Any) -> None:
        """The end of a step: if all are to save, saves now. It stands for ``run`` where the step is no function.

        Call it after each step, in all tasks; it counts in ``total_run_calls``.

        Args:
          *args: For the manager's ``save``, or the ``save_fn``.
          **kwargs: For the same.

        Raises what ``run`` raises.
        """
        self._num_calls += 1
        self._steps.end_and_save(lambda: self._write(*args, **kwargs))

    @contextlib.contextmanager
    def watch_preemption_scope(self) -> Iterator[None]:
        """Inside, all may save and end before any call of ``strategy.run``, ``run_steps`` or an ``rx.function``,
        without ``run``: for loops that know from what is saved alone how far they are.

        ``with handler.watch_preemption_scope(): while step < 100: train_step(iterator)``, where ``train_step`` adds to
        ``step``. These calls are not counted in ``total_run_calls``.
        """
        with program_guard.guarding(self._around_program):
            yield

    def close(self) -> None:
        """Watches no longer: SIGTERM does what it did before. In the main thread. Also at the end of a ``with``."""
        self._steps.close()

    def __enter__(self) -> PreemptionCheckpointHandler:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    # --- inside -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        """Around a step. If all are to save, saves before it, or after it where its data has been read."""
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

    def _save(self) -> None:
        self._steps.save(self._write)

    def _write(self, *args: Any, **kwargs: Any) -> None:
        for coordinator in coordinators_at_work():
            coordinator.join()
        if self._save_fn is not None:
            self._save_fn(*args, **kwargs)
        elif self._saved_at != self._num_calls:
            self._manager.checkpoint.checkpointed_runs = self._num_calls
            self._manager.save(*args, **kwargs)
            self._manager.wait()
        self._saved_at = self._num_calls

    def _restored_calls(self) -> int:
        """Restores, if there is something; how often ``run`` had been called."""
        checkpoint = self._manager.checkpoint
        vars(checkpoint).pop(
            "checkpointed_runs", None
        )  # a checkpoint of a program without a handler has none
        self._manager.restore_or_initialize()
        checkpoint.checkpointed_runs = 0  # which is replaced by what was saved
        num_calls = int(vars(checkpoint)["checkpointed_runs"])
        if self._peers is None:
            return num_calls
        of_all = self._peers.gather(
            "preemption: run calls", num_calls, "to make a PreemptionCheckpointHandler"
        )
        if len(set(of_all)) > 1:
            restored = ", ".join(
                f"{calls} on {name}" for name, calls in zip(self._peers.names, of_all, strict=True)
            )
            raise InvalidArgumentError(
                f"The tasks have restored different numbers of run calls: {restored}. The directory {self._manager.directory!r} "
                "must be one that all tasks share."
            )
        return num_calls


def _manager_of(given: Any, checkpoint_dir: str | os.PathLike[str] | None) -> CheckpointManager:
    if isinstance(given, CheckpointManager):
        if checkpoint_dir is not None and os.path.abspath(checkpoint_dir) != os.path.abspath(given.directory):
            raise InvalidArgumentError(
                f"checkpoint_dir is {os.fspath(checkpoint_dir)!r}, and the CheckpointManager saves to {str(given.directory)!r}. "
                "Leave checkpoint_dir out."
            )
        return given
    if not isinstance(given, Checkpoint):
        raise InvalidArgumentError(
            f"PreemptionCheckpointHandler takes an rx.Checkpoint or an rx.CheckpointManager, got {given!r:.200}."
        )
    if checkpoint_dir is None:
        raise InvalidArgumentError(
            "With an rx.Checkpoint PreemptionCheckpointHandler needs `checkpoint_dir`, a directory that all tasks share. Or give it "
            "an rx.CheckpointManager."
        )
    return CheckpointManager(given, checkpoint_dir, max_to_keep=1)


def _peers_of(resolver: ClusterResolver | None) -> Peers | None:
    """The tasks that take the same steps as this one."""
    if resolver is not None and not isinstance(resolver, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver is strategy.cluster_resolver, or one of rx.cluster_resolver; got {resolver!r:.200}."
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
            "PreemptionCheckpointHandler: this process has not joined its cluster yet. Make the MultiWorkerMirroredStrategy first, "
            "in all tasks."
        )
    return peers

"""Ray Train: ``ReplicaxConfig`` makes its workers a cluster; ``fit`` raises the cause of a failure; ``report``."""

from __future__ import annotations

import contextlib
import importlib
import os
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

from replicax._launch.ray.starts import cause_of, environment_of_start
from replicax._src.cluster.credentials import Credentials, random_token
from replicax._src.cluster.machine_layout import STATUS_ADDRESS_VARIABLE, free_ports
from replicax._src.cluster.spec import Task, join_address
from replicax._src.packaging.extras import missing_extra
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE
from replicax._src.vocabulary.options import whole_number

if TYPE_CHECKING:  # a worker must get its environment before it imports JAX
    from replicax._src.checkpoint.manager import CheckpointManager

# The names exist without Ray too, for documentation; each use raises.
ray: Any = None
_backend: Any = types.SimpleNamespace(Backend=object, BackendConfig=object)
_has_train = False
with contextlib.suppress(ImportError):
    ray = importlib.import_module("ray")
    _backend = importlib.import_module("ray.train.backend")  # needs more packages than Ray's core
    _has_train = True


def check_ray(what: str, *, needs_train: bool = True) -> None:
    """Raises a MissingExtraError for this use if Ray, or Ray Train, is not installed."""
    if ray is None or (needs_train and not _has_train):
        raise missing_extra(what, "ray")


@final
@dataclass
class ReplicaxConfig(_backend.BackendConfig):
    """Makes the workers of a Ray trainer the workers of a ``MultiWorkerMirroredStrategy`` or another synchronous one.

    Pass it as ``jax_config`` to Ray's ``JaxTrainer``, or as ``backend_config`` to its ``DataParallelTrainer``. Before
    each start and restart it sets ``TF_CONFIG``, a token, ``REPLICAX_RESTART_COUNT`` and ``KERAS_BACKEND`` in all
    workers, and the ``REPLICAX_TOKEN`` and ``REPLICAX_STATUS_ADDRESS`` of the process that creates it. Variables of
    ``worker_runtime_env`` have priority. The strategy starts JAX. A worker that has saved because its node is taken
    away ends as preempted, which Ray counts in ``max_preemption_failures``. The name follows Ray's ``JaxConfig`` and
    ``TorchConfig``.

    Attributes:
      devices_per_worker: The virtual CPU devices of each worker; None for the accelerators that Ray has reserved for
        it, or one CPU device.

    Raises:
      InvalidArgumentError: The number is not allowed.
      MissingExtraError: Ray is not installed.
    """

    devices_per_worker: int | None = None

    def __post_init__(self) -> None:
        check_ray("rx.ray.ReplicaxConfig")
        if self.devices_per_worker is not None:
            whole_number("ReplicaxConfig(devices_per_worker=…)", self.devices_per_worker, least=1)
        # Ray does not give the driver's variables to workers. These are no fields, so that no repr shows the token.
        self._token = Credentials.from_environment(os.environ).token
        self._status_address = os.environ.get(STATUS_ADDRESS_VARIABLE)

    @property
    def backend_cls(self) -> type[_ReplicaxBackend]:
        return _ReplicaxBackend

    @property
    def train_func_context(self) -> Callable[[], contextlib.AbstractContextManager[None]]:
        return _told_preempted


class _ReplicaxBackend(_backend.Backend):
    """Runs in Ray's controller. A start of the workers is a new cluster, with new addresses."""

    _num_starts = 0

    def on_start(self, worker_group: Any, backend_config: ReplicaxConfig) -> None:
        addresses = worker_group.execute(own_address)
        shared = {
            "token": backend_config._token or random_token(),
            "status_address": backend_config._status_address,
            "num_restarts": self._num_starts,
            "num_devices": backend_config.devices_per_worker,
            "resources": worker_group.get_resources_per_worker(),
        }
        self._num_starts += 1
        ray.get(
            [
                worker_group.execute_single_async(index, _set_environment, addresses, index, shared)
                for index in range(len(addresses))
            ]
        )


def own_address() -> str:
    """Returns an address of this process with a port that is free now."""
    return join_address(ray.util.get_node_ip_address(), free_ports(1)[0])


def _set_environment(addresses: list[str], index: int, shared: Mapping[str, Any]) -> None:
    cluster = {"worker": addresses}
    os.environ.update(environment_of_start(cluster, Task("worker", index), os.environ, **shared))


@contextlib.contextmanager
def _told_preempted() -> Iterator[None]:
    """Ends the training of a preempted worker with the error by which Ray restarts it without counting a failure."""
    try:
        yield
    except SystemExit as end:
        if end.code != PREEMPTED_EXIT_CODE:
            raise
        text = "This worker was preempted, and has saved."
        raise ray.exceptions.RayActorError(error_msg=text, preempted=True) from None


def fit(trainer: Any) -> Any:
    """Returns ``trainer.fit()``. If workers fail, raises the error of the first worker that failed.

    Ray's ``fit`` raises one error for all workers, in which a survivor's ``PeerFailureError`` may hide the cause. It is
    the ``__cause__`` of the error raised here.

    Args:
      trainer: A trainer of Ray Train.

    Returns:
      Ray's ``Result``. ``return_value`` is what worker 0's function returned.

    Raises:
      Exception: The error of the worker that failed first.
      ray.train.TrainingFailedError: The training failed for a reason outside of the workers.
      MissingExtraError: Ray is not installed.
    """
    check_ray("rx.ray.fit")
    try:
        return trainer.fit()
    except ray.train.WorkerGroupError as error:
        rank, cause = cause_of(error.worker_failures)
        cause.add_note(f"Worker {rank} raised this in Ray. Its traceback is in the WorkerGroupError above.")
        raise cause from error


def report(metrics: Mapping[str, Any], manager: CheckpointManager | None = None) -> None:
    """Reports metrics, and a copy of the newest checkpoint, to Ray Train and Tune.

    Call it in the training function, in all workers equally often: it waits for all of them. Worker 0 copies the
    checkpoint to the ``storage_path`` of the run, and Ray's ``CheckpointConfig`` says how many copies are kept.

    Args:
      metrics: The metrics, by name.
      manager: The manager whose newest checkpoint is reported, after its save has ended. None for metrics only.

    Raises:
      CheckpointError: The save has failed.
      MissingExtraError: Ray is not installed.
    """
    check_ray("rx.ray.report")
    path = None if manager is None else manager.latest_checkpoint
    is_mine = path is not None and ray.train.get_context().get_world_rank() == 0
    ray.train.report(dict(metrics), checkpoint=ray.train.Checkpoint.from_directory(path) if is_mine else None)

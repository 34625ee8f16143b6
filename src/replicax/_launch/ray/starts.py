"""The environment of a task that Ray starts, and the cause of a failed training. Pure: it does not import Ray."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from replicax._src.cluster.credentials import TOKEN_FILE_VARIABLE, TOKEN_VARIABLE
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.machine_layout import (
    RESTART_COUNT_VARIABLE,
    STATUS_ADDRESS_VARIABLE,
    task_environment,
)
from replicax._src.cluster.spec import Task
from replicax._src.keras.backend import VARIABLE as KERAS_VARIABLE


def environment_of_start(
    cluster: Mapping[str, Sequence[str]],
    task: Task,
    environment: Mapping[str, str],
    *,
    token: str,
    status_address: str | None = None,
    num_restarts: int = 0,
    num_devices: int | None = None,
    resources: Mapping[str, float] | None = None,
    is_server: bool = False,
) -> dict[str, str]:
    """Returns the variables of a task that are added to ``environment``, or replace variables of it.

    Args:
      cluster: The addresses of ``TF_CONFIG``.
      task: The task.
      environment: The variables of its process.
      token: The secret of the job, unless the environment has one.
      status_address: Where the chief serves the status, unless the environment says it.
      num_restarts: The number of times that the task has been restarted.
      num_devices: The virtual CPU devices of each worker. None: the environment decides.
      resources: What Ray has reserved for the task. Without GPUs and TPUs, JAX uses the CPU.
      is_server: True if it runs ``replicax server``.

    >>> told = environment_of_start({"worker": ["a:1"]}, Task("worker", 0), {}, token="secret", resources={"CPU": 1})
    >>> told["JAX_PLATFORMS"], told["REPLICAX_TOKEN"], told["REPLICAX_RESTART_COUNT"]
    ('cpu', 'secret', '0')
    """
    defaults = {KERAS_VARIABLE: "jax"}
    if resources is not None and not any(resources.get(name) for name in ("GPU", "TPU")):
        defaults["JAX_PLATFORMS"] = "cpu"
    if TOKEN_FILE_VARIABLE not in environment:
        defaults[TOKEN_VARIABLE] = token
    if status_address is not None:
        defaults[STATUS_ADDRESS_VARIABLE] = status_address
    return {
        **{name: value for name, value in defaults.items() if name not in environment},
        **task_environment(cluster, task, environment, num_devices=num_devices, is_server=is_server),
        RESTART_COUNT_VARIABLE: str(num_restarts),
    }


def cause_of(failures: Mapping[int, BaseException]) -> tuple[int, BaseException]:
    """Returns the rank and the error of the worker that failed first, as far as the errors say.

    A worker's own error comes before the death of a process, and that before the ``ClusterFailureError`` of a survivor.

    Args:
      failures: The error of each worker that failed, by its rank.
    """

    def order(failure: tuple[int, BaseException]) -> tuple[int, int]:
        rank, error = failure
        is_of_ray = type(error).__module__.partition(".")[0] == "ray"
        return (2 if isinstance(error, ClusterFailureError) else int(is_of_ray), rank)

    return min(failures.items(), key=order)

"""The arguments of a server: ``ServerDef`` identifies its task, and ``ServerOptions`` has its options. Pure."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, final

from replicax._ps.store.log import DEFAULT_LOG_BYTES
from replicax._src.program_kit.cluster_tasks import ClusterDef, ClusterSpec, Credentials, Membership, Task
from replicax._src.program_kit.errors import InvalidArgumentError

PROTOCOLS: Final = ("grpc", "grpc+tls")
JOBS: Final = ("worker", "ps")


@final
@dataclass(frozen=True)
class ServerDef:
    """The cluster of a server, and its task in it: ``tf.train.ServerDef``.

    Attributes:
      cluster: All tasks.
      job_name: ``worker`` or ``ps``.
      task_index: The index of the task, from 0.
      protocol: ``grpc``, or ``grpc+tls``, which needs a certificate.

    Raises:
      InvalidArgumentError: The job or the protocol is not one of these.
      ClusterError: The cluster is invalid, or does not have the task.
    """

    cluster: ClusterSpec
    job_name: str
    task_index: int
    protocol: str = "grpc"

    def __post_init__(self) -> None:
        if self.job_name not in JOBS:
            raise InvalidArgumentError(
                f"A Server is a task of the job 'worker' or 'ps', got job_name={self.job_name!r}. The chief and the "
                "evaluator run your program, and need no Server."
            )
        if self.protocol not in PROTOCOLS:
            raise InvalidArgumentError(
                f"protocol must be {' or '.join(map(repr, PROTOCOLS))}, got {self.protocol!r}; None is 'grpc'."
            )
        Membership(self.cluster, self.task)

    @property
    def task(self) -> Task:
        return Task(self.job_name, self.task_index)

    @property
    def address(self) -> str:
        """The address at which the task listens."""
        return self.cluster.task_address(self.job_name, self.task_index)

    @classmethod
    def of(
        cls,
        server_or_cluster_def: ServerDef
        | ClusterSpec
        | ClusterDef
        | Mapping[str, Sequence[str] | Mapping[int, str]],
        job_name: str | None,
        task_index: int | None,
        protocol: str | None,
    ) -> ServerDef:
        """Combines the arguments of ``Server``, as in TensorFlow. Missing ones follow from the others if possible.

        Raises:
          InvalidArgumentError: A required argument is missing.
          ClusterError: As for ``ServerDef``.
        """
        if isinstance(server_or_cluster_def, ServerDef):
            known = server_or_cluster_def
            return cls(
                known.cluster,
                known.job_name if job_name is None else job_name,
                known.task_index if task_index is None else task_index,
                known.protocol if protocol is None else protocol,
            )
        spec = ClusterSpec(server_or_cluster_def)
        job = _only(spec.jobs, "job_name") if job_name is None else job_name
        index = _only(spec.task_indices(job), "task_index") if task_index is None else task_index
        return cls(spec, job, index, "grpc" if protocol is None else protocol)


def _only(names: Sequence[Any], argument: str) -> Any:
    if len(names) != 1:
        raise InvalidArgumentError(
            f"Must specify an explicit `{argument}`: the cluster has {', '.join(map(str, names)) or 'none'}, and this server could "
            "be any of them."
        )
    return names[0]


@final
@dataclass(frozen=True)
class ServerOptions:
    """Options of a server: the ``config`` of ``Server``.

    Attributes:
      credentials: The credentials that it shares with the other tasks; None for those of the environment.
      on_coordinator_loss: The reaction to the loss of the coordinator. "wait": the task drops that coordinator's
        data, and waits for the next one. "exit": the task ends.
      silence_timeout_s: The time in seconds after which a silent coordinator is lost.
      wait_timeout_s: The longest wait in seconds for a coordinator, the first or the next, before the task ends.
      snapshot_dir: The directory in which a ps writes snapshots of its values, into a folder of its own, at
        intervals and at an orderly end. A ps that restarts with the same directory resumes from there; with
        ``replication=2`` only if the other server of a variable is lost too. None turns snapshots off.
      snapshot_interval_s: The seconds between two snapshots. ``math.inf``: only when the coordinator asks for one.
      log_bytes: With ``replication=2``, the most memory that a ps uses for updates that a backup lacks, for
        each group of variables. A backup that lacks more gets the whole state.

    Raises:
      InvalidArgumentError: A value is not allowed.
    """

    credentials: Credentials | None = None
    on_coordinator_loss: Literal["wait", "exit"] = "wait"
    silence_timeout_s: float = 60.0
    wait_timeout_s: float = math.inf
    snapshot_dir: str | os.PathLike[str] | None = None
    snapshot_interval_s: float = 60.0
    log_bytes: int = DEFAULT_LOG_BYTES

    def __post_init__(self) -> None:
        if self.on_coordinator_loss not in ("wait", "exit"):
            raise InvalidArgumentError(
                f"on_coordinator_loss must be 'wait' or 'exit', got {self.on_coordinator_loss!r}."
            )
        for name in ("silence_timeout_s", "wait_timeout_s", "snapshot_interval_s"):
            if not getattr(self, name) > 0:
                raise InvalidArgumentError(
                    f"{name} must be a number of seconds above 0, or math.inf; got {getattr(self, name)!r}."
                )
        if type(self.log_bytes) is not int or self.log_bytes < 1:
            raise InvalidArgumentError(f"log_bytes must be a number of at least 1; got {self.log_bytes!r}.")

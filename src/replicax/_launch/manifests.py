"""``KubernetesJob``: a cluster as the documents that Kubernetes takes, a JobSet or a Kubeflow TrainJob. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from replicax._src.cluster.credentials import TOKEN_VARIABLE
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.machine_layout import (
    CHECKPOINT_DIR_VARIABLE,
    REPLICATION_VARIABLE,
    RESTART_COUNT_VARIABLE,
    SERVER_COMMAND,
    ClusterLayout,
)
from replicax._src.cluster.spec import Task
from replicax._src.preemption.termination import PREEMPTED_EXIT_CODE

Document = dict[str, Any]

_INDEX_VARIABLE: Final = "TASK_INDEX"
_INDEX: Final = "metadata.annotations['batch.kubernetes.io/job-completion-index']"
_RESTARTS: Final = "metadata.annotations['jobset.sigs.k8s.io/restart-attempt']"
# The replicated job, and the container, of Kubeflow's runtime.
_NODE: Final = "node"


@dataclass(frozen=True)
class KubernetesJob:
    """A job of pods, one for each task of a cluster.

    Attributes:
      name: The name of the job, with which those of its pods begin.
      image: The container image. It has Python, replicax and the script.
      command: The arguments of ``python``.
      layout: The tasks.
      token: The secret that the tasks share.
      namespace: The namespace; None: that of who creates the job.
      port: The port of every task.
      gpus_per_task: The GPUs of each task except parameter servers.
      environment: Further variables of all tasks.
      checkpoint_dir: Where ``volume_claim`` is mounted.
      volume_claim: The PersistentVolumeClaim with the checkpoints.
      max_restarts: The restarts of all tasks after failures. One after a preemption is not counted.
      server_restarts: The restarts of each task that runs `replicax server`, unless its values would be lost.
      replication: The number of copies of each variable.
      grace_s: The time that a pod has between SIGTERM and SIGKILL.

    Raises:
      ClusterError: ``checkpoint_dir`` is relative, or ``environment`` has a variable that the job itself sets.
    """

    name: str
    image: str
    command: Sequence[str]
    layout: ClusterLayout
    token: str
    namespace: str | None
    port: int
    gpus_per_task: int | None
    environment: Mapping[str, str]
    checkpoint_dir: Path | None
    volume_claim: str | None
    max_restarts: int
    server_restarts: int
    replication: int
    grace_s: int

    def __post_init__(self) -> None:
        if self.checkpoint_dir is not None and not self.checkpoint_dir.is_absolute():
            raise ClusterError(
                f"--checkpoint-dir {self.checkpoint_dir} must be an absolute path, such as /saved: the pods mount "
                "--volume-claim there."
            )
        own = {_INDEX_VARIABLE, "TF_CONFIG", TOKEN_VARIABLE, RESTART_COUNT_VARIABLE, *self._told}
        for name in sorted(own & self.environment.keys()):
            raise ClusterError(
                f"--env {name}: the job itself sets this variable. Leave it out. The token is that of your {TOKEN_VARIABLE}."
            )

    @property
    def secret(self) -> Document:
        """The Secret with the token."""
        return {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": self._metadata(f"{self.name}-token"),
            "stringData": {"token": self.token},
        }

    @property
    def jobset(self) -> Document:
        """The JobSet: one replicated job for each type of task."""
        kinds: dict[str, int] = {}
        for task in self.layout.tasks:
            kinds[task.type] = kinds.get(task.type, 0) + 1
        awaited = ["chief" if self.layout.chief else "worker"]  # servers do not end by themselves
        success = {"successPolicy": {"operator": "All", "targetReplicatedJobs": awaited}}
        return {
            "apiVersion": "jobset.x-k8s.io/v1alpha2",
            "kind": "JobSet",
            "metadata": self._metadata(self.name),
            "spec": {
                "network": {"enableDNSHostnames": True},
                **(success if self.layout.servers() else {}),
                "failurePolicy": {
                    "maxRestarts": self.max_restarts,
                    "restartStrategy": "BlockingRecreate",
                    "rules": [
                        {
                            "name": "preempted",
                            "action": "RestartJobSetAndIgnoreMaxRestarts",
                            "onJobFailureReasons": ["PodFailurePolicy"],
                        }
                    ],
                },
                "replicatedJobs": [
                    {"name": kind, "replicas": 1, "template": {"spec": self._job(kind, count)}}
                    for kind, count in kinds.items()
                ],
            },
        }

    @property
    def train_job(self) -> Document:
        """The TrainJob of Kubeflow Trainer v2, for workers only."""
        trainer: Document = {
            "image": self.image,
            "command": ["python", *self.command],
            "numNodes": self.layout.num_workers,
            "env": self._variables(),
        }
        if self.gpus_per_task:
            trainer["resourcesPerNode"] = self._resources()
        pod: Document = {"terminationGracePeriodSeconds": self.grace_s}
        if self.volume_claim is not None:
            pod |= {"volumes": self._volumes()}
            pod |= {"containers": [{"name": _NODE, "volumeMounts": self._mounts()}]}
        node = {"name": _NODE, "template": {"spec": {"template": {"spec": pod}}}}
        patch = {"template": {"spec": {"replicatedJobs": [node]}}}
        return {
            "apiVersion": "trainer.kubeflow.org/v1alpha1",
            "kind": "TrainJob",
            "metadata": self._metadata(self.name),
            "spec": {
                "runtimeRef": {"name": "jax-distributed"},
                "trainer": trainer,
                "runtimePatches": [{"manager": "replicax.launch", "trainingRuntimeSpec": patch}],
            },
        }

    def _metadata(self, name: str) -> Document:
        return {"name": name} | ({} if self.namespace is None else {"namespace": self.namespace})

    def _job(self, kind: str, count: int) -> Document:
        """Returns the spec of an Indexed Job with all tasks of one type."""
        is_server = Task(kind, 0) in self.layout.servers()
        may_restart = is_server and (kind != "ps" or self.replication > 1)
        container: Document = {
            "name": "replicax",
            "image": self.image,
            "command": ["python", *(SERVER_COMMAND if is_server else self.command)],
            "ports": [{"containerPort": self.port}],
            "env": [_from_field(_INDEX_VARIABLE, _INDEX), *self._variables(), self._tf_config(kind)],
        }
        if self.gpus_per_task and kind != "ps":
            container["resources"] = self._resources()
        if self.volume_claim is not None:
            container["volumeMounts"] = self._mounts()
        saved = {"containerName": "replicax", "operator": "In", "values": [PREEMPTED_EXIT_CODE]}
        lost = {"onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}  # its node is taken away
        rules = [{"action": "Ignore" if may_restart else "FailJob", **lost}]
        return {
            "completionMode": "Indexed",
            "parallelism": count,
            "completions": count,
            "backoffLimit": self.server_restarts * count if may_restart else 0,
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": saved}, *rules]},
            "template": {
                "spec": {
                    "restartPolicy": "Never",
                    "shareProcessNamespace": True,  # process 1 would ignore SIGTERM until it listens
                    "terminationGracePeriodSeconds": self.grace_s,
                    "containers": [container],
                    **({"volumes": self._volumes()} if self.volume_claim is not None else {}),
                }
            },
        }

    def _tf_config(self, kind: str) -> Document:
        """Returns the variable TF_CONFIG, into which Kubernetes puts the index of the pod."""
        cluster: dict[str, list[str]] = {}
        for task in self.layout.tasks_with_address:
            host = f"{self.name}-{task.type}-0-{task.index}.{self.name}"
            cluster.setdefault(task.type, []).append(f"{host}:{self.port}")
        own = f'{{"type": "{kind}", "index": $({_INDEX_VARIABLE})}}'
        return {"name": "TF_CONFIG", "value": f'{{"cluster": {json.dumps(cluster)}, "task": {own}}}'}

    @property
    def _told(self) -> dict[str, str]:
        """The variables that options set."""
        told = {}
        if self.checkpoint_dir is not None:
            told[CHECKPOINT_DIR_VARIABLE] = str(self.checkpoint_dir)
        if self.replication > 1:
            told[REPLICATION_VARIABLE] = str(self.replication)
        return told

    def _variables(self) -> list[Document]:
        """Returns the variables that all tasks share."""
        values = {"PYTHONUNBUFFERED": "1", "KERAS_BACKEND": "jax", **self.environment, **self._told}
        secret = {"secretKeyRef": {"name": f"{self.name}-token", "key": "token"}}
        return [
            *({"name": name, "value": value} for name, value in values.items()),
            {"name": TOKEN_VARIABLE, "valueFrom": secret},
            _from_field(RESTART_COUNT_VARIABLE, _RESTARTS),
        ]

    def _resources(self) -> Document:
        return {"limits": {"nvidia.com/gpu": self.gpus_per_task}}

    def _volumes(self) -> list[Document]:
        return [{"name": "checkpoints", "persistentVolumeClaim": {"claimName": self.volume_claim}}]

    def _mounts(self) -> list[Document]:
        return [{"name": "checkpoints", "mountPath": str(self.checkpoint_dir)}]


def _from_field(name: str, path: str) -> Document:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}

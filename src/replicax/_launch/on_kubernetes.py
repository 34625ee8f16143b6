"""``replicax launch --on k8s``: creates a JobSet or a TrainJob, or prints it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from replicax._launch.hosts import DEFAULT_PORT
from replicax._launch.manifests import Document, KubernetesJob
from replicax._launch.option_values import positive
from replicax._src.cluster.credentials import TOKEN_VARIABLE, random_token
from replicax._src.cluster.errors import ClusterError, ClusterManagerError
from replicax._src.cluster.kubernetes import KubernetesExecutableLocation, loaded_client, shown_error
from replicax._src.cluster.machine_layout import ClusterLayout, device_environment

OWN_OPTIONS: Final = frozenset({"image", "name", "namespace", "kind", "volume_claim", "env", "grace_period"})
SHARED_OPTIONS: Final = frozenset(
    {
        "workers",
        "chief",
        "ps",
        "gpus_per_worker",
        "devices_per_worker",
        "max_restarts",
        "checkpoint_dir",
        "server_restarts",
        "replication",
        "port",
    }
)
HOW_TO_WATCH: Final = (
    "give --env REPLICAX_STATUS_ADDRESS=0.0.0.0:8080, set REPLICAX_TOKEN before the launch, and run `kubectl port-forward POD 8080` "
    "with the pod of the chief (worker 0 without one), then `replicax top 127.0.0.1:8080`"
)
# A TrainJob has workers only, and its runtime decides the rest.
_JOBSET_ONLY: Final = {
    "chief": None,
    "ps": 0,
    "max_restarts": 0,
    "server_restarts": 3,
    "replication": 1,
    "port": DEFAULT_PORT,
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds the options that only Kubernetes has."""
    group = parser.add_argument_group("Kubernetes (--on k8s)")
    group.add_argument("--image", help="the container image, with Python, replicax and the script")
    group.add_argument(
        "--kind",
        choices=("jobset", "trainjob"),
        default="jobset",
        help="create a JobSet, or a TrainJob of Kubeflow Trainer v2, which has workers only (jobset)",
    )
    group.add_argument("--name", help="name of the job (that of the script)")
    group.add_argument(
        "--namespace", help="namespace of the job (that of kubectl; without --dry-run: default)"
    )
    group.add_argument(
        "--volume-claim", metavar="NAME", help="the PersistentVolumeClaim to mount at --checkpoint-dir"
    )
    group.add_argument(
        "--env",
        type=_variable,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a variable of all tasks; may be repeated",
    )
    group.add_argument(
        "--grace-period",
        type=positive,
        default=120,
        metavar="S",
        help="seconds that a pod has to save between SIGTERM and SIGKILL (120)",
    )


def launch(options: argparse.Namespace, command: Sequence[str]) -> int:
    """Creates the job, or prints it with ``--dry-run``. Returns the exit code.

    Raises:
      ClusterError: The options do not describe a job.
      ClusterManagerError: Kubernetes did not create the job.
    """
    job = _job(options, command)
    documents = [job.secret, job.train_job if options.kind == "trainjob" else job.jobset]
    if options.dry_run:
        print(json.dumps({"apiVersion": "v1", "kind": "List", "items": documents}, indent=2))
        return 0
    namespace = job.namespace or "default"
    _create(documents, namespace)
    kind = documents[-1]["kind"]
    print(f"Created {kind} {job.name} in namespace {namespace}. Its output:")
    print(
        f"  kubectl logs --namespace {namespace} --follow --prefix --tail=-1 --max-log-requests={len(job.layout.tasks)} "
        f"-l jobset.sigs.k8s.io/jobset-name={job.name}"
    )
    print(
        f"  kubectl delete --namespace {namespace} {kind.lower()}/{job.name} secret/{job.name}-token  # ends it"
    )
    return 0


def _job(options: argparse.Namespace, command: Sequence[str]) -> KubernetesJob:
    if options.image is None:
        raise ClusterError("--on k8s needs --image, a container image with Python, replicax and the script.")
    if options.workers == "auto":
        raise ClusterError("--workers auto counts the devices of this machine: give --on k8s a number.")
    if (options.checkpoint_dir is None) != (options.volume_claim is None):
        raise ClusterError(
            "--checkpoint-dir and --volume-claim go together: what a pod writes elsewhere is lost with the pod."
        )
    if options.kind == "trainjob":
        for name, default in _JOBSET_ONLY.items():
            if getattr(options, name) != default:
                raise ClusterError(
                    f"--{name.replace('_', '-')} does not go with --kind trainjob. Leave one out."
                )
    devices = {} if options.devices_per_worker is None else device_environment(options.devices_per_worker, {})
    has_chief = bool(options.ps) if options.chief is None else options.chief
    return KubernetesJob(
        name=_name(options, command),
        image=options.image,
        command=command,
        layout=ClusterLayout(1 if options.workers is None else options.workers, has_chief, options.ps),
        token=os.environ.get(TOKEN_VARIABLE) or random_token(),
        namespace=options.namespace,
        port=options.port,
        gpus_per_task=options.gpus_per_worker,
        environment=devices | dict(options.env),
        checkpoint_dir=options.checkpoint_dir,
        volume_claim=options.volume_claim,
        max_restarts=options.max_restarts,
        server_restarts=options.server_restarts,
        replication=options.replication,
        grace_s=options.grace_period,
    )


def _create(documents: Sequence[Document], namespace: str) -> None:
    client: Any = loaded_client(KubernetesExecutableLocation.OFF_CLUSTER, "replicax launch --on k8s")
    for document in documents:
        group, _, version = document["apiVersion"].rpartition("/")
        try:
            if group:
                plural = f"{document['kind'].lower()}s"
                client.CustomObjectsApi().create_namespaced_custom_object(
                    group, version, namespace, plural, document
                )
            else:
                client.CoreV1Api().create_namespaced_secret(namespace, document)
        except Exception as error:  # its error classes exist only if the package is installed
            if group:  # else its Secret would refuse the next try
                with contextlib.suppress(Exception):
                    client.CoreV1Api().delete_namespaced_secret(documents[0]["metadata"]["name"], namespace)
            named = f"{document['kind']} {document['metadata']['name']}"
            raise ClusterManagerError(
                f"Kubernetes did not create {named} in namespace {namespace}: {shown_error(error)}. If it answered 404, JobSet or "
                "Kubeflow Trainer is not installed there; if 409, delete the earlier one or give another --name."
            ) from error


def _name(options: argparse.Namespace, command: Sequence[str]) -> str:
    """Returns the name of the job, by default that of the script or of the module."""
    stem = command[1].rpartition(".")[2] if command[0] == "-m" else Path(command[0]).stem
    name = options.name or re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    if not re.fullmatch(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", name):
        raise ClusterError(
            f"{name!r} cannot be the name of a job: give a --name of at most 40 of a-z, 0-9 and -, which begins with a letter "
            "and does not end with -. The names of the pods begin with it."
        )
    return name


def _variable(text: str) -> tuple[str, str]:
    name, found, value = text.partition("=")
    if not found or not re.fullmatch(r"[A-Za-z_]\w*", name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    return name, value

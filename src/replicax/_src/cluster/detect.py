"""Chooses the resolver that fits the environment of this process, and gives the reason. Pure."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import final

from replicax._src.cluster import sagemaker, slurm
from replicax._src.cluster.environ import PORT_VARIABLE, leader_port, optional_number, whole_number
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.jax_distributed import JaxClusterResolver
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.open_mpi import OpenMPIClusterResolver
from replicax._src.cluster.ranked import RankedResolver
from replicax._src.cluster.resolver import ClusterResolver, SimpleClusterResolver, membership_of
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.tf_config import VARIABLE, TFConfigClusterResolver, read_tf_config
from replicax._src.cluster.torchrun import TorchrunClusterResolver
from replicax._src.vocabulary.errors import InvalidArgumentError


@final
@dataclass(frozen=True)
class PassedOver:
    """A candidate that was checked and not chosen.

    Attributes:
      name: The name of the candidate, such as ``Slurm``.
      why: The reason in one sentence.
      is_partial: True if only some of its variables are set, and these describe a cluster.
    """

    name: str
    why: str
    is_partial: bool = False


@final
@dataclass(frozen=True)
class ResolverChoice:
    """The resolver that fits the environment.

    Attributes:
      resolver: The resolver. The cluster of a single worker is empty.
      name: The source of the description: ``TF_CONFIG``, ``torchrun``, ``Open MPI``, ``Slurm``, ``JAX``,
        ``SageMaker`` or ``none``.
      reason: The reason for the choice in one sentence.
      membership: The cluster and the task, as the resolver described them when it was chosen.
      passed_over: The earlier candidates, in the order in which they were checked.
      local_rank: The number of this worker among those on this host, from 0; None if the launcher does not say.
    """

    resolver: ClusterResolver
    name: str
    reason: str
    membership: Membership
    passed_over: tuple[PassedOver, ...] = ()
    local_rank: int | None = None


@dataclass(frozen=True)
class _Found:
    resolver: ClusterResolver
    reason: str
    local_rank: int | None = None


def checked_resolver(given: ClusterResolver | None) -> ClusterResolver:
    """Returns a strategy's resolver, or, for None, the resolver that fits the environment.

    Raises:
      InvalidArgumentError: The argument is not a resolver.
    """
    if given is None:
        return choose_resolver().resolver
    if not isinstance(given, ClusterResolver):
        raise InvalidArgumentError(
            f"cluster_resolver must be an rx.cluster_resolver.ClusterResolver, got {type(given).__name__}: {given!r:.200}. Leave "
            'it out to read the environment, or write SimpleClusterResolver(ClusterSpec({"worker": [...], "ps": [...]})).'
        )
    return given


def choose_resolver(environ: MutableMapping[str, str] | None = None) -> ResolverChoice:
    """Returns the resolver for this process.

    TF_CONFIG comes first, because a user wrote it. Launchers follow, the innermost first, because it starts in the
    environment of the outer one: torchrun, Open MPI, Slurm (a step of several tasks), JAX's own variables (a
    Kubeflow TrainJob), SageMaker (several hosts). Kubernetes and Compute Engine are never chosen: their environment
    does not say which machines form a cluster. A TPU pod needs TF_CONFIG, because its metadata, which
    ``jax.distributed.initialize()`` reads, is not used here. If nothing fits, the process is a single worker.

    Args:
      environ: Replaces ``os.environ``. Slurm's resolver sets CUDA_VISIBLE_DEVICES in it.

    Raises:
      ClusterError: The description is malformed, or only some variables of a launcher are set and nothing else fits.

    >>> choice = choose_resolver({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "n", "MASTER_PORT": "29500"})
    >>> choice.name, choice.membership.num_workers
    ('torchrun', 2)
    """
    environ = os.environ if environ is None else environ
    passed_over: list[PassedOver] = []
    for name, look in _CANDIDATES:
        found = look(environ)
        if isinstance(found, _Found):
            return _choice(name, found, tuple(passed_over))
        passed_over.append(found)
    partial = [candidate for candidate in passed_over if candidate.is_partial]
    if partial:
        raise ClusterEnvironmentError(
            "The environment describes a cluster in part: "
            + " ".join(f"{candidate.name}: {candidate.why}" for candidate in partial)
            + " Set what is missing, or unset the rest to train with one worker on its own."
        )
    alone = _Found(
        SimpleClusterResolver(ClusterSpec({})),
        "Nothing in the environment describes a cluster: one worker on its own.",
    )
    return _choice("none", alone, tuple(passed_over))


def _choice(name: str, found: _Found, passed_over: tuple[PassedOver, ...]) -> ResolverChoice:
    return ResolverChoice(
        found.resolver, name, found.reason, membership_of(found.resolver), passed_over, found.local_rank
    )


def _tf_config(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    if VARIABLE not in environ:
        return PassedOver(VARIABLE, "TF_CONFIG is not set.")
    if not environ[VARIABLE].strip():
        return PassedOver(VARIABLE, "TF_CONFIG is set to nothing.")
    has_cluster = bool(read_tf_config(environ).get("cluster"))
    reason = (
        "TF_CONFIG is set." if has_cluster else "TF_CONFIG is set and has no cluster: one worker on its own."
    )
    return _Found(TFConfigClusterResolver(environ=environ), reason)


def _torchrun(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    # Other programs set only MASTER_ADDR and MASTER_PORT.
    is_cluster = bool(environ.get("RANK")) or environ.get("WORLD_SIZE", "1") != "1"
    return _ranked("torchrun", TorchrunClusterResolver, environ, is_cluster=is_cluster)


def _open_mpi(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    return _ranked("Open MPI", OpenMPIClusterResolver, environ, is_cluster=True)


def _jax(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    # The address is also a setting for jax.distributed.initialize().
    is_cluster = bool(environ.get("JAX_PROCESS_ID") or environ.get("JAX_NUM_PROCESSES"))
    return _ranked("JAX", JaxClusterResolver, environ, is_cluster=is_cluster)


def _ranked(
    name: str, kind: type[RankedResolver], environ: MutableMapping[str, str], *, is_cluster: bool
) -> _Found | PassedOver:
    passed_over = _passed_over(name, environ, kind.variables, is_cluster=is_cluster)
    if passed_over is not None:
        return passed_over
    resolver, (rank, size) = kind(environ=environ), kind.variables[:2]
    reason = f"{kind.launcher}'s {rank}={environ[rank]} and {size}={environ[size]} are set."
    return _Found(resolver, reason, resolver.local_rank)


def _slurm(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    if not environ.get(slurm.NUM_TASKS):
        if environ.get("SLURM_JOB_ID"):
            return PassedOver("Slurm", "This process is in a Slurm job, but not in a step: srun starts one.")
        return PassedOver("Slurm", f"{slurm.NUM_TASKS} is not set.")
    num_tasks = whole_number(environ, slurm.NUM_TASKS, least=1)
    if num_tasks == 1:
        return PassedOver("Slurm", "The step has one task.")
    passed_over = _passed_over(
        "Slurm", environ, (slurm.NUM_TASKS, slurm.RANK, slurm.NODE_LIST, slurm.TASKS_PER_NODE)
    )
    if passed_over is not None:
        return passed_over
    job = optional_number(environ, "SLURM_JOB_ID") or 0
    # Each job gets its own 16 ports, because jobs may share a node.
    resolver = slurm.SlurmClusterResolver(port_base=leader_port(environ, 16 * job), environ=environ)
    return _Found(
        resolver,
        f"This is a Slurm step with {slurm.NUM_TASKS}={num_tasks}.",
        optional_number(environ, "SLURM_LOCALID"),
    )


def _sagemaker(environ: MutableMapping[str, str]) -> _Found | PassedOver:
    passed_over = _passed_over("SageMaker", environ, (sagemaker.HOSTS, sagemaker.CURRENT_HOST))
    if passed_over is not None:
        return passed_over
    hosts, _ = sagemaker.read_hosts(environ)
    if len(hosts) <= 1:
        return PassedOver("SageMaker", "The job has one host.")
    port = leader_port(environ, 0) if environ.get(PORT_VARIABLE) else sagemaker.PORT
    resolver = sagemaker.SageMakerClusterResolver(port, environ=environ)
    return _Found(resolver, f"SageMaker's {sagemaker.HOSTS} has {len(hosts)} hosts.")


def _kubernetes(environ: MutableMapping[str, str]) -> PassedOver:
    if not environ.get("KUBERNETES_SERVICE_HOST"):
        return PassedOver("Kubernetes", "This is not a pod.")
    return PassedOver(
        "Kubernetes",
        "This is a pod, but its environment does not name the pods of a cluster: set TF_CONFIG in the manifest, or "
        "pass a KubernetesClusterResolver.",
    )


_CANDIDATES: tuple[tuple[str, Callable[[MutableMapping[str, str]], _Found | PassedOver]], ...] = (
    (VARIABLE, _tf_config),
    ("torchrun", _torchrun),
    ("Open MPI", _open_mpi),
    ("Slurm", _slurm),
    ("JAX", _jax),
    ("SageMaker", _sagemaker),
    ("Kubernetes", _kubernetes),
)


def _passed_over(
    name: str, environ: MutableMapping[str, str], variables: tuple[str, ...], *, is_cluster: bool = True
) -> PassedOver | None:
    """Returns a candidate that lacks variables as passed over; None if all its variables are set.

    Args:
      is_cluster: True if the variables that are set describe a cluster.
    """
    there = [name for name in variables if environ.get(name)]
    missing = [name for name in variables if name not in there]
    if not there:
        return PassedOver(name, f"None of {', '.join(variables)} is set.")
    are, are_not = ("are" if len(names) > 1 else "is" for names in (there, missing))
    why = f"{', '.join(there)} {are} set, and {', '.join(missing)} {are_not} not."
    return PassedOver(name, why, is_partial=is_cluster) if missing else None

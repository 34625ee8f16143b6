"""``SlurmClusterResolver``: the cluster of a Slurm job step, from node lists, tasks per node and GPUs."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, MutableMapping
from typing import final

from replicax._src.cluster.environ import require, whole_number
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.resolver import AddressedResolver
from replicax._src.cluster.spec import ClusterSpec, join_address

RANK = "SLURM_PROCID"
NUM_TASKS = "SLURM_STEP_NUM_TASKS"
NODE_LIST = "SLURM_STEP_NODELIST"
TASKS_PER_NODE = "SLURM_STEP_TASKS_PER_NODE"
VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"


def expand_hostlist(hostlist: str) -> list[str]:
    """Returns the hosts of a Slurm node list, in its order: ``"n[08-10],m5" -> n08, n09, n10, m5``.

    A name may have several ranges, and text after them: ``"r[1-2]n[1-2]-ib"``.

    Raises:
      ClusterEnvironmentError: It is malformed.
    """
    return [host for part in _split_hostlist(hostlist) for host in _expand_part(part, hostlist)]


def expand_tasks_per_node(tasks_per_node: str) -> list[int]:
    """Returns how many tasks each node has: ``"2(x3),1" -> 2, 2, 2, 1``.

    Raises:
      ClusterEnvironmentError: It is malformed.
    """
    counts = []
    for part in tasks_per_node.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip(), re.ASCII)
        if match is None:
            raise ClusterEnvironmentError(
                f'Invalid tasks-per-node list format "{tasks_per_node}": {part!r} is neither a number nor of the form '
                f"2(x3). Slurm writes it into {TASKS_PER_NODE}; do not set it by hand."
            )
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


@final
class SlurmClusterResolver(AddressedResolver):
    """The cluster of the Slurm step that this process belongs to: the tasks that ``srun`` started.

    The resolver assumes ``srun``'s default placement of ranks, ``--distribution=block``, or ``cyclic``. The tasks of a
    node get ``port_base`` and the ports after it. Jobs take ranks in alphabetical order. The constructor reads all
    variables.

    Args:
      jobs: The number of tasks of each job; by default all are workers.
      port_base: The port of the first task on each node.
      gpus_per_node: The GPUs of each node; by default those in CUDA_VISIBLE_DEVICES, else SLURM_GPUS_ON_NODE, else
        none.
      gpus_per_task: The GPUs of each task; by default an even share of those of its node.
      tasks_per_node: One number, or a mapping from host names; by default Slurm's value.
      auto_set_gpu: True to let ``cluster_spec()`` set CUDA_VISIBLE_DEVICES to this task's share if several tasks share
        a node's GPUs. It has no effect once JAX's backend has started.
      rpc_layer: See ``ClusterResolver``.
      environ: Replaces ``os.environ``.

    Raises:
      ClusterEnvironmentError: Variables of the step are missing, malformed, or contradict the arguments.

    >>> resolver = SlurmClusterResolver(environ={
    ...     "SLURM_PROCID": "2", "SLURM_STEP_NUM_TASKS": "3",
    ...     "SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1"})
    >>> resolver.cluster_spec(), resolver.get_task_info()
    (ClusterSpec({'worker': ['n1:8888', 'n1:8889', 'n2:8888']}), ('worker', 2))
    """

    def __init__(
        self,
        jobs: Mapping[str, int] | None = None,
        port_base: int = 8888,
        gpus_per_node: int | None = None,
        gpus_per_task: int | None = None,
        tasks_per_node: int | Mapping[str, int] | None = None,
        auto_set_gpu: bool = True,
        rpc_layer: str | None = "grpc",
        *,
        environ: MutableMapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        require(environ, (RANK,) if jobs else (RANK, NUM_TASKS), "srun")
        rank = whole_number(environ, RANK)
        jobs = dict(jobs or {"worker": whole_number(environ, NUM_TASKS, least=1)})
        tasks_on = _tasks_on_hosts(environ, tasks_per_node)
        _check_counts(jobs, tasks_on, rank)
        places = _places(tasks_on, environ.get("SLURM_DISTRIBUTION", "block"))
        _check_node(environ, rank, places, tasks_on)

        self.rpc_layer = rpc_layer
        self.task_type, self.task_id = _task_of_rank(jobs, rank)
        self._environ = environ
        self._cluster_spec = _spec(jobs, places, port_base)
        most = max(tasks_on.values())
        visible = _visible_gpus(environ)
        per_task = _gpus_per_task(environ, gpus_per_node, gpus_per_task, most, len(visible))
        self._accelerators = {"GPU": per_task}
        is_shared = most > 1 and per_task > 0 and "SLURM_GPUS_PER_TASK" not in environ
        num_used = most * per_task
        gpus = visible if len(visible) >= num_used else [str(number) for number in range(num_used)]
        first = places[rank][1] * per_task
        self._own_gpus = gpus[first : first + per_task] if auto_set_gpu and is_shared else None

    def cluster_spec(self) -> ClusterSpec:
        """Returns the tasks of the step. It sets CUDA_VISIBLE_DEVICES, see ``auto_set_gpu``."""
        if self._own_gpus is not None:
            self._environ[VISIBLE_GPUS] = ",".join(self._own_gpus)
        return self._cluster_spec

    def get_task_info(self) -> tuple[str | None, int | None]:
        """Returns the type and the index of this process's task."""
        return self.task_type, self.task_id


# --- node lists ---------------------------------------------------------------------------------------


def _split_hostlist(hostlist: str) -> Iterator[str]:
    """Splits at the commas that are not in brackets."""
    parts = re.split(r",(?![^\[\]]*\])", hostlist.strip())
    for part in parts:
        if not re.fullmatch(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", part):
            raise _invalid_hostlist(
                hostlist,
                f"{part!r} is not a host or range"
                if part
                else "an item at its ends or between two commas is empty",
            )
        yield part


def _expand_part(part: str, hostlist: str) -> Iterator[str]:
    """Expands ``r[1-2]n[1-2]`` to r1n1, r1n2, r2n1, r2n2."""
    before, bracket, rest = part.partition("[")
    if not bracket:
        yield part
        return
    ranges, _, after = rest.partition("]")
    for number in _expand_ranges(ranges, hostlist):
        for end in _expand_part(after, hostlist):
            yield before + number + end


def _expand_ranges(ranges: str, hostlist: str) -> Iterator[str]:
    """Expands ``08-10,12`` to 08, 09, 10, 12."""
    for part in ranges.split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip(), re.ASCII)
        if match is None:
            raise _invalid_hostlist(hostlist, f"{part!r} is neither a number nor a range such as 08-10")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise _invalid_hostlist(hostlist, f"the range {part!r} goes backwards")
        for number in range(first, last + 1):
            yield str(number).zfill(len(match[1]))


def _invalid_hostlist(hostlist: str, why: str) -> ClusterEnvironmentError:
    return ClusterEnvironmentError(
        f'Invalid hostlist format "{hostlist}": {why}. Slurm writes it into {NODE_LIST}, such as n[1-3],m7; do not set '
        f"it by hand."
    )


# --- which rank is where ------------------------------------------------------------------------------


def _tasks_on_hosts(
    environ: Mapping[str, str], tasks_per_node: int | Mapping[str, int] | None
) -> dict[str, int]:
    """Returns the number of tasks on each host, in the order of the node list."""
    if isinstance(tasks_per_node, Mapping):
        # Ranks follow the order of the node list. Without a node list, they follow TensorFlow's order.
        listed = expand_hostlist(environ[NODE_LIST]) if environ.get(NODE_LIST) else []
        order = [host for host in listed if host in tasks_per_node]
        order += sorted(tasks_per_node.keys() - set(order))
        return {host: int(tasks_per_node[host]) for host in order}
    if tasks_per_node is not None:
        require(environ, (NODE_LIST,), "srun")
        return dict.fromkeys(expand_hostlist(environ[NODE_LIST]), int(tasks_per_node))
    require(environ, (NODE_LIST, TASKS_PER_NODE), "srun")
    hosts = expand_hostlist(environ[NODE_LIST])
    counts = expand_tasks_per_node(environ[TASKS_PER_NODE])
    if len(hosts) != len(counts):
        raise ClusterEnvironmentError(
            f"{NODE_LIST}={environ[NODE_LIST]!r} has {len(hosts)} node(s), and "
            f"{TASKS_PER_NODE}={environ[TASKS_PER_NODE]!r} has {len(counts)}. Slurm sets both; one was changed, or comes "
            f"from another step."
        )
    return dict(zip(hosts, counts))


def _check_counts(jobs: Mapping[str, int], tasks_on: Mapping[str, int], rank: int) -> None:
    requested, assigned = sum(jobs.values()), sum(tasks_on.values())
    if requested != assigned or not assigned:
        raise ClusterEnvironmentError(
            f"Requested {requested} tasks but only {assigned} were assigned. Requested: {dict(jobs)}; Slurm placed "
            f"{dict(tasks_on)}. Let the numbers of `jobs` sum to srun's --ntasks."
        )
    if rank >= assigned:
        raise ClusterEnvironmentError(
            f"{RANK}={rank} must be less than the number of tasks, {assigned}: it is left over from another step."
        )


def _places(tasks_on: Mapping[str, int], distribution: str) -> list[tuple[str, int]]:
    """Returns the host of each rank, and the number of the rank on that host.

    Args:
      distribution: Slurm's distribution: ``block`` fills one node after the other, ``cyclic`` takes the nodes in turn.
    """
    over_nodes = distribution.partition(":")[0].partition(",")[0].lower()
    slots = [(number, host) for host, count in tasks_on.items() for number in range(count)]
    if over_nodes == "cyclic":
        slots.sort(key=lambda slot: slot[0])  # stable: the hosts stay in order
    elif over_nodes not in ("block", "*", ""):
        raise ClusterEnvironmentError(
            f"SLURM_DISTRIBUTION={distribution!r} is not supported: the placement of ranks is known only for block and cyclic. Start "
            f"with srun --distribution=block, or set TF_CONFIG."
        )
    return [(host, number) for number, host in slots]


def _check_node(
    environ: Mapping[str, str], rank: int, places: list[tuple[str, int]], tasks_on: Mapping[str, int]
) -> None:
    """Checks that this process is on the node of its rank. Otherwise it would listen at another task's address."""
    node, expected = environ.get("SLURMD_NODENAME", ""), places[rank][0]
    if node in tasks_on and node != expected:
        raise ClusterEnvironmentError(
            f"{RANK}={rank} should be on node {expected!r}, and this is SLURMD_NODENAME={node!r}: srun placed the tasks "
            f"in another way than {dict(tasks_on)} one after the other. Start with srun --distribution=block, or give "
            f"tasks_per_node."
        )


def _task_of_rank(jobs: Mapping[str, int], rank: int) -> tuple[str, int]:
    for job, num_tasks in sorted(jobs.items()):
        if rank < num_tasks:
            return job, rank
        rank -= num_tasks
    raise AssertionError("the rank was compared with the number of tasks")


def _spec(jobs: Mapping[str, int], places: list[tuple[str, int]], port_base: int) -> ClusterSpec:
    addresses = iter([join_address(host, port_base + number) for host, number in places])
    return ClusterSpec(
        {job: [next(addresses) for _ in range(num_tasks)] for job, num_tasks in sorted(jobs.items())},
        source="Slurm's variables",
    )


# --- GPUs ---------------------------------------------------------------------------------------------


def _visible_gpus(environ: Mapping[str, str]) -> list[str]:
    return [gpu.strip() for gpu in environ.get(VISIBLE_GPUS, "").split(",") if gpu.strip()]


def _gpus_per_task(
    environ: Mapping[str, str], per_node: int | None, per_task: int | None, most_tasks: int, num_visible: int
) -> int:
    if per_node is None:
        in_environment = "SLURM_GPUS_ON_NODE" if environ.get("SLURM_GPUS_ON_NODE", "").isdecimal() else ""
        if VISIBLE_GPUS in environ or not in_environment:
            per_node = num_visible
        else:
            per_node = int(environ[in_environment])
        if "SLURM_GPUS_PER_TASK" in environ and per_task is None:
            return num_visible  # Slurm has distributed them: each task sees its own
    per_task = per_node // most_tasks if per_task is None else per_task
    if per_task < 0 or most_tasks * per_task > per_node:
        raise ClusterEnvironmentError(
            f"Requested more GPUs per node than available. A node has {per_node}, and {most_tasks} task(s) with "
            f"{per_task} each were asked for. Lower gpus_per_task, or give gpus_per_node."
        )
    return per_task

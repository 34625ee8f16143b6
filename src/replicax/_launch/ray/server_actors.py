"""``parameter_servers``: the tasks of a cluster with parameter servers as Ray actors, whose addresses may change."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, final

from replicax._launch.ray.starts import environment_of_start
from replicax._launch.ray.training import check_ray, own_address, ray
from replicax._src.cluster.credentials import (
    TOKEN_FILE_VARIABLE,
    TOKEN_VARIABLE,
    Credentials,
    random_token,
)
from replicax._src.cluster.machine_layout import DEVICES_VARIABLE, SERVER_COMMAND, ClusterLayout, tf_config
from replicax._src.cluster.processes import Process
from replicax._src.cluster.routes import ROUTES_VARIABLE
from replicax._src.cluster.spec import Task
from replicax._src.cluster.tf_config import TFConfigClusterResolver

log = logging.getLogger("replicax")
_LOOK_S: Final = 1.0
_START_S: Final = 60.0
_PROCESS_RESTARTS: Final = 5
Cluster = Mapping[str, Sequence[str]]


@contextlib.contextmanager
def parameter_servers(
    workers: int = 2,
    ps: int = 1,
    *,
    resources_per_worker: Mapping[str, float] | None = None,
    resources_per_ps: Mapping[str, float] | None = None,
    placement_strategy: str = "SPREAD",
    devices_per_worker: int | None = None,
    server_arguments: Sequence[str] = (),
    max_restarts: int = -1,
    name: str | None = None,
    timeout_s: float = 600.0,
) -> Iterator[TFConfigClusterResolver]:
    """Runs workers and parameter servers as Ray actors; this process is their coordinator.

    Each task is ``replicax server`` in a process of its own, which ends with its actor. If an actor or its node is
    lost, Ray starts the actor again, on any node, and the running job finds the task at its new address: a worker
    takes functions again; a parameter server copies its variables from their other copies (``replication=2``), or
    reads its snapshot, and the coordinator logs what was lost. Snapshots must be on storage that all nodes share.

    In the block this process has the variables of the chief, so a ``ParameterServerStrategy`` that is created from the
    environment finds the cluster.

    Args:
      workers: The number of workers.
      ps: The number of parameter servers.
      resources_per_worker: What Ray reserves for each worker; one CPU by default.
      resources_per_ps: What Ray reserves for each parameter server; one CPU by default.
      placement_strategy: The strategy of Ray's placement group.
      devices_per_worker: The virtual CPU devices of each worker; None for its own devices.
      server_arguments: More arguments of ``replicax server``: ``("--snapshot-dir", "/shared/snapshots")``.
      max_restarts: How often Ray starts each actor again; -1 for any number of times. A process that ends while its
        actor lives is started again five times at most.
      name: The beginning of the actors' names, such as ``"job"`` for ``job-ps-0``.
      timeout_s: The longest wait for the resources and the first start.

    Yields:
      The resolver for the strategy.

    Raises:
      ClusterError: The cluster would have no worker.
      MissingExtraError: Ray is not installed.
      ray.exceptions.GetTimeoutError: Ray has not reserved the resources in time.
    """
    check_ray("rx.ray.parameter_servers", needs_train=False)
    from ray.util.placement_group import (  # type: ignore[import-not-found]
        placement_group,
        remove_placement_group,
    )
    from ray.util.scheduling_strategies import (  # type: ignore[import-not-found]
        PlacementGroupSchedulingStrategy,
    )

    layout = ClusterLayout(workers, chief=True, num_ps=ps)
    needs = {"worker": dict(resources_per_worker or {"CPU": 1}), "ps": dict(resources_per_ps or {"CPU": 1})}
    # "SPREAD" gives the first ones nodes of their own: a lost node must not have both copies of a variable.
    tasks = sorted(
        (task for task in layout.tasks if task.type != "chief"), key=lambda task: task.type != "ps"
    )
    shared = {
        "token": Credentials.from_environment(os.environ).token or random_token(),
        "num_devices": devices_per_worker,
    }
    name = f"replicax-{random_token()[:6]}" if name is None else name
    if not ray.is_initialized():
        ray.init()
    with contextlib.ExitStack() as stack:
        group = placement_group([needs[task.type] for task in tasks], strategy=placement_strategy)
        stack.callback(remove_placement_group, group)
        ray.get(group.ready(), timeout=timeout_s)
        actors = {
            task: ray.remote(_ServerTask)
            .options(
                name=f"{name}-{task.type}-{task.index}",
                num_cpus=needs[task.type].get("CPU", 0),
                num_gpus=needs[task.type].get("GPU", 0),
                resources={
                    key: value for key, value in needs[task.type].items() if key not in ("CPU", "GPU")
                },
                max_restarts=max_restarts,
                scheduling_strategy=PlacementGroupSchedulingStrategy(
                    group, placement_group_bundle_index=number
                ),
            )
            .remote(task, shared | {"resources": needs[task.type]}, list(server_arguments))
            for number, task in enumerate(tasks)
        }
        for actor in actors.values():
            stack.callback(ray.kill, actor)
        addresses = ray.get([actors[task].address.remote() for task in tasks], timeout=timeout_s)
        cluster: dict[str, list[str]] = {"chief": [own_address()]}
        for task, address in zip(tasks, addresses, strict=True):
            cluster.setdefault(task.type, []).append(address)
        routes = stack.enter_context(contextlib.closing(_Routes()))
        keeper = _Keeper(actors, cluster, routes)
        stack.callback(keeper.close)
        keeper.start(timeout_s)
        told = {
            "TF_CONFIG": tf_config(cluster, Task("chief", 0)),
            TOKEN_VARIABLE: shared["token"],
            ROUTES_VARIABLE: routes.path,
        } | ({} if devices_per_worker is None else {DEVICES_VARIABLE: str(devices_per_worker)})
        stack.enter_context(_environment(told))
        yield TFConfigClusterResolver(environ=told)


@final
class _Routes:
    """A file of routes that has no name in a folder, so that nothing of it is left when this process is killed."""

    def __init__(self) -> None:
        self._file = os.memfd_create("routes")
        self.path = f"/proc/{os.getpid()}/fd/{self._file}"
        self.write({})

    def write(self, routes: Mapping[str, str]) -> None:
        """Replaces the contents at once: no reader finds a part of them."""
        new = os.memfd_create("routes")
        os.write(new, json.dumps(dict(routes)).encode())
        os.dup2(new, self._file, inheritable=False)
        os.close(new)

    def close(self) -> None:
        os.close(self._file)


@final
class _ServerTask:
    """One task, in an actor: it holds the process of ``replicax server``, and its routes.

    Args:
      task: The task.
      shared: More arguments of ``environment_of_start``.
      arguments: More arguments of ``replicax server``.
    """

    def __init__(self, task: Task, shared: Mapping[str, Any], arguments: Sequence[str]):
        self._task, self._shared, self._arguments = task, shared, arguments
        self._routes = _Routes()
        self._process: Process | None = None

    def address(self) -> str:
        return own_address()

    def state(self) -> str:
        """Returns ``"new"`` before ``start``, ``"running"``, or how the process ended."""
        if self._process is None:
            return "new"
        return str(self._process.ending or "running")

    def route(self, routes: Mapping[str, str]) -> None:
        self._routes.write(routes)

    def start(self, cluster: Cluster, routes: Mapping[str, str], num_restarts: int) -> None:
        """Starts the process. ``cluster`` has the address at which it listens."""
        if self._process is not None:
            self._process.close()
        self.route(routes)
        told = environment_of_start(
            cluster, self._task, os.environ, num_restarts=num_restarts, is_server=True, **self._shared
        )
        told |= {ROUTES_VARIABLE: self._routes.path, "PYTHONUNBUFFERED": "1"}
        told[TOKEN_VARIABLE] = self._shared["token"]  # the coordinator's, whatever the node has
        here = {name: value for name, value in os.environ.items() if name != TOKEN_FILE_VARIABLE}
        self._process = Process(
            [sys.executable, *SERVER_COMMAND, *self._arguments],
            environment={**here, **told},
            name=str(self._task),
            on_line=print,
        )


@final
class _Keeper:
    """Starts the tasks of actors that Ray has started again, and tells all processes their addresses.

    The cluster keeps the first addresses, which routes replace.

    Args:
      actors: The actor of each task.
      cluster: The addresses of the tasks.
      own: The routes of this process.
    """

    def __init__(self, actors: Mapping[Task, Any], cluster: Cluster, own: _Routes):
        self._actors, self._cluster, self._own = actors, cluster, own
        self._routes: dict[str, str] = {}
        self._num_starts = dict.fromkeys(actors, 0)
        self._num_ended = dict.fromkeys(actors, 0)  # processes that ended although their actor lives
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._keep, name="replicax-ray", daemon=True)

    def start(self, timeout_s: float) -> None:
        ray.get([self._started(task, self._cluster) for task in self._actors], timeout=timeout_s)
        self._thread.start()

    def close(self) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join(2 * _START_S)

    def _started(self, task: Task, cluster: Cluster) -> Any:
        self._num_starts[task] += 1
        return self._actors[task].start.remote(cluster, self._routes, self._num_starts[task] - 1)

    def _keep(self) -> None:
        while not self._is_over.wait(_LOOK_S):
            states = {actor.state.remote(): task for task, actor in self._actors.items()}
            for ref in ray.wait(list(states), num_returns=len(states), timeout=_LOOK_S)[0]:
                try:
                    state = ray.get(ref)
                    if state != "running" and not self._is_over.is_set():
                        self._look_after(states[ref], state)
                except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
                    log.debug("%s: %s", states[ref], error)  # Ray starts it again, or it does not
                except Exception as error:
                    log.warning("%s could not be started again: %s", states[ref], error)

    def _look_after(self, task: Task, state: str) -> None:
        if state != "new":
            if self._num_ended[task] > _PROCESS_RESTARTS:
                return
            self._num_ended[task] += 1
            if self._num_ended[task] > _PROCESS_RESTARTS:
                log.error(
                    "%s is not started again: its process %s, after %d restarts.",
                    task,
                    state,
                    _PROCESS_RESTARTS,
                )
                return
        self._start_again(task, state)

    def _start_again(self, task: Task, state: str) -> None:
        address = ray.get(self._actors[task].address.remote(), timeout=_START_S)
        first = self._cluster[task.type][task.index]
        self._routes[first] = address
        self._own.write(self._routes)
        for other, actor in self._actors.items():
            if other != task:
                actor.route.remote(self._routes)
        now = {job: [self._routes.get(each, each) for each in to] for job, to in self._cluster.items()}
        ray.get(self._started(task, now), timeout=_START_S)
        why = "its actor was lost" if state == "new" else f"its process {state}"
        log.warning("%s was started again, at %s: %s.", task, address, why)


@contextlib.contextmanager
def _environment(told: Mapping[str, str]) -> Iterator[None]:
    """Sets variables of this process in the block."""
    before = {name: os.environ.get(name) for name in (*told, TOKEN_FILE_VARIABLE)}
    os.environ.pop(TOKEN_FILE_VARIABLE, None)
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

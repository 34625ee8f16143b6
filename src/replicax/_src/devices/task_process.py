"""Configures JAX in a process that is a task of a cluster with parameter servers, before JAX starts."""

from __future__ import annotations

import os

import jax

from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.cluster.tf_config import says_this_process_is
from replicax._src.devices.jax_backend import prepare_backend
from replicax._src.jax_internals.jax_compat import backend_started


def prepare_own_process(cluster: ClusterSpec, task: Task) -> None:
    """Calls ``prepare_process`` if ``TF_CONFIG`` says that this process is that task. One process may have several."""
    if says_this_process_is(task):
        prepare_process(cluster, task)


def prepare_process(cluster: ClusterSpec, task: Task) -> None:
    """Configures devices, threads and the cache of compiled programs, unless the user has. Does nothing once JAX has
    started.

    A ps computes on the CPU, so that it takes no accelerator from a worker on its host. The tasks of a host share its
    cores. A restarted worker need not compile its programs again.
    """
    if backend_started():
        return
    if task.type == "ps" and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if task.type == "ps":
        # The thread that runs an update waits for it under a lock, so a second thread would only delay it.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    prepare_backend(cluster.num_tasks_beside(task), is_task=True)

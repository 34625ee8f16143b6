"""Configures JAX in a process that is a task of a cluster with parameter servers, before JAX starts."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import jax

from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.devices.topology import prepare_backend
from replicax._src.jax_compat import backend_started

PROGRAM_CACHE_VARIABLE: Final = "REPLICAX_PROGRAM_CACHE"
NO_PROGRAM_CACHE: Final = "off"


def prepare_process(cluster: ClusterSpec, task: Task) -> None:
    """Configures devices, threads and the cache of compiled programs, unless the user has. Does nothing once JAX has
    started.

    A ps computes on the CPU, so that it takes no accelerator from a worker on its host. The tasks of a host share its
    cores. Compiled programs are cached in a folder of the user, so that a restarted worker need not compile them
    again:
    in JAX_COMPILATION_CACHE_DIR, if it is set. ``REPLICAX_PROGRAM_CACHE`` names another folder, or is ``off``.
    """
    if backend_started():
        return
    if task.type == "ps" and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")
    if task.type == "ps":
        # The thread that runs an update waits for it under a lock, so a second thread would only delay it.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    prepare_backend(cluster.num_tasks_beside(task))
    folder = program_cache(os.environ)
    if folder is not None and not os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        jax.config.update("jax_compilation_cache_dir", str(folder))


def program_cache(environ: Mapping[str, str]) -> Path | None:
    """Returns the folder of the cache of compiled programs; None if it is off.

    >>> program_cache({"XDG_CACHE_HOME": "/caches"}), program_cache({"REPLICAX_PROGRAM_CACHE": "off"})
    (PosixPath('/caches/replicax/programs'), None)
    """
    said = environ.get(PROGRAM_CACHE_VARIABLE, "")
    if said == NO_PROGRAM_CACHE:
        return None
    caches = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(said or f"{caches}/replicax/programs").expanduser()

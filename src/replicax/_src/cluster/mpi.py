"""Checks the environment for collectives by MPI: the library and the launcher. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from replicax._src.cluster.environ import whole_number
from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.open_mpi import SIZE as OPEN_MPI_SIZE
from replicax._src.cluster.slurm import NUM_TASKS as SLURM_SIZE

LIBRARY = "MPITRAMPOLINE_LIB"
CHOICE = "JAX_CPU_COLLECTIVES_IMPLEMENTATION"

_OTHERWISE = f"Without {CHOICE}=mpi the workers use gloo, which needs neither."


def check_mpi(environ: Mapping[str, str], num_workers: int) -> None:
    """Checks that MPI will start with one process for each worker. Otherwise MPI would end the process without a Python
    error, or treat each process as the only one.

    Raises:
      ClusterEnvironmentError: MPI will not start, or has a different number of processes.

    >>> check_mpi({"MPITRAMPOLINE_LIB": "libmpiwrapper.so", "OMPI_COMM_WORLD_SIZE": "2"}, 2)
    """
    _check_library(environ.get(LIBRARY, ""))
    variable = _size_variable(environ)
    if variable is None:
        raise ClusterEnvironmentError(
            f"{CHOICE} is mpi, and no MPI launcher has started this process: neither {OPEN_MPI_SIZE} nor PMI_SIZE is set. "
            f"MPI would take each process for the only one. Start the workers with mpirun -n {num_workers}. {_OTHERWISE}"
        )
    size = whole_number(environ, variable, least=1)
    if size != num_workers:
        raise ClusterEnvironmentError(
            f"{variable}={size}, and the cluster has {num_workers} worker(s): with {CHOICE}=mpi mpirun must start the "
            f"workers, and nothing else. Start them with mpirun -n {num_workers}. {_OTHERWISE}"
        )


def _check_library(path: str) -> None:
    if not path:
        found = f"{LIBRARY} is not set"
    elif os.sep in path and not os.path.isfile(path):
        found = f"{LIBRARY}={path!r} is not a file"
    else:
        return
    raise ClusterEnvironmentError(
        f"{CHOICE} is mpi, and {found}. JAX finds MPI through a library that has to be built once for the MPI of the "
        f"machine: run replicax mpi-collectives build, give its path, and pass it on with mpirun -x {LIBRARY}. {_OTHERWISE}"
    )


def _size_variable(environ: Mapping[str, str]) -> str | None:
    """Returns the variable with the number of processes from Open MPI, MPICH and derivatives, or srun --mpi=pmix."""
    for variable in (OPEN_MPI_SIZE, "PMI_SIZE"):
        if environ.get(variable):
            return variable
    return SLURM_SIZE if environ.get("PMIX_RANK") and environ.get(SLURM_SIZE) else None

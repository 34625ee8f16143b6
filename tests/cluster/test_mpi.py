"""Whether MPI collectives can start, by the environment; that they are used only on request; and how a process that
used them ends. ``tests/multi_worker/test_mpi.py`` runs them if there is an MPI."""

import logging
import subprocess
import sys

import jax
import pytest

from checks import message
from replicax import errors
from replicax._src import jax_compat
from replicax._src.cluster.mpi import check_mpi
from replicax._src.options import CommunicationImplementation
from replicax._src.strategies.multi_worker_mirrored import _check_devices_for_mpi, _say_what_communicates

LIBRARY = {"MPITRAMPOLINE_LIB": "libmpiwrapper.so"}  # without a folder: the linker looks for it
OPEN_MPI = {**LIBRARY, "OMPI_COMM_WORLD_SIZE": "2"}
HYDRA = {**LIBRARY, "PMI_SIZE": "2"}
SLURM = {**LIBRARY, "PMIX_RANK": "0", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize("environ", [OPEN_MPI, HYDRA, SLURM], ids=["Open MPI", "MPICH", "Slurm with PMIx"])
def test_a_launcher_that_starts_the_workers(environ):
    check_mpi(environ, 2)


def test_the_path_of_the_library(tmp_path):
    library = tmp_path / "libmpiwrapper.so"
    environ = {**OPEN_MPI, "MPITRAMPOLINE_LIB": str(library)}
    says = message(errors.ClusterEnvironmentError, lambda: check_mpi(environ, 2))
    assert f"MPITRAMPOLINE_LIB='{library}' is not a file" in says
    library.touch()
    check_mpi(environ, 2)


@pytest.mark.parametrize(
    ("environ", "says"),
    [
        ({"OMPI_COMM_WORLD_SIZE": "2"}, "JAX_CPU_COLLECTIVES_IMPLEMENTATION is mpi, and MPITRAMPOLINE_LIB is not set"),
        (LIBRARY, "no MPI launcher has started this process"),
        ({**LIBRARY, "SLURM_STEP_NUM_TASKS": "2"}, "no MPI launcher has started this process"),
        ({**LIBRARY, "OMPI_COMM_WORLD_SIZE": "3"}, "OMPI_COMM_WORLD_SIZE=3, and the cluster has 2 worker(s)"),
        ({**LIBRARY, "PMI_SIZE": "two"}, "PMI_SIZE='two' in the environment must be a whole number of at least 1"),
    ],
    ids=["no library", "no mpirun", "srun without PMIx", "an evaluator too", "no number"],
)  # fmt: skip
def test_missing_parts_are_named(environ, says):
    assert says in message(errors.ClusterEnvironmentError, lambda: check_mpi(environ, 2))


def test_errors_say_what_to_do():
    says = message(errors.ClusterEnvironmentError, lambda: check_mpi(LIBRARY, 2))
    assert "mpirun -n 2" in says


def test_one_device_in_each_process():
    device = jax.devices("cpu")[0]
    _check_devices_for_mpi([device])
    says = message(errors.ClusterStartError, lambda: _check_devices_for_mpi([device] * 2))
    assert says.startswith(
        "Each worker has 2 CPU devices, and JAX's collectives by MPI work with one in each process."
    )


# --- which library --------------------------------------------------------------------------------------


@pytest.mark.parametrize("chosen", ["gloo", None])
def test_gloo_unless_mpi_is_requested(chosen):
    with changed("jax_cpu_collectives_implementation", chosen):
        assert jax_compat.cpu_collectives() == "gloo"
    with changed("jax_cpu_collectives_implementation", "mpi"):
        assert jax_compat.cpu_collectives() == "mpi"


class changed:
    """Sets a JAX option for a while."""

    def __init__(self, name, value):
        self.name, self.value = name, value

    def __enter__(self):
        self.before = getattr(jax.config, self.name)
        jax.config.update(self.name, self.value)

    def __exit__(self, *error):
        jax.config.update(self.name, self.before)


@pytest.mark.parametrize(
    ("wanted", "platform", "library", "says"),
    [
        ("AUTO", "cpu", "gloo", None),
        ("AUTO", "cpu", "mpi", None),
        ("AUTO", "gpu", "gloo", None),
        ("RING", "cpu", "gloo", None),
        ("NCCL", "gpu", "gloo", None),
        ("NCCL", "cpu", "gloo", "NCCL is for GPUs: on CPU the workers use gloo."),
        ("NCCL", "cpu", "mpi", "NCCL is for GPUs: on CPU the workers use MPI."),
        ("NCCL", "tpu", "gloo", "NCCL is for GPUs: on TPU the workers use XLA."),
        ("RING", "cpu", "mpi", "RING is gloo's, on CPUs: here the workers use MPI."),
        ("RING", "tpu", "gloo", "RING is gloo's, on CPUs: here the workers use XLA."),
        ("RING", "gpu", "gloo", "RING is gloo's, on CPUs: here the workers use NCCL, which chooses"),
    ],
)
def test_implementation_that_the_hardware_lacks(wanted, platform, library, says, caplog):
    with changed("jax_cpu_collectives_implementation", library), caplog.at_level(logging.WARNING, "replicax"):
        _say_what_communicates(CommunicationImplementation(wanted), platform)
    assert len(caplog.messages) == (says is not None)
    assert (says or "") in "".join(caplog.messages)


# --- in processes ---------------------------------------------------------------------------------------


def join():
    import logging

    logging.basicConfig(level=logging.INFO)
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    try:
        strategy = rx.MultiWorkerMirroredStrategy()
    except rx.errors.ReplicaxError as error:
        report(kind=type(error).__name__, text=str(error))
        raise SystemExit(3) from None
    numbers = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
    report(total=float(strategy.reduce("SUM", numbers, axis=None)))


@pytest.mark.rest
@pytest.mark.timeout(90)
def test_the_log_says_gloo_in_processes(local_cluster):
    cluster = local_cluster(2)
    cluster.start(join)
    for result in cluster.wait().values():
        assert result.report == {"total": 2.0}, result.output
        assert any(line.endswith("here; collectives by gloo.") for line in result.output), result.output


@pytest.mark.timeout(90)
def test_mpi_without_a_library_is_an_error_in_processes(local_cluster):
    """It ends at once, before JAX ends the process in MPI_Init."""
    environment = {"JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi", "MPITRAMPOLINE_LIB": None}
    cluster = local_cluster(2, environment=environment)
    cluster.start(join)
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ClusterEnvironmentError"
        assert "MPITRAMPOLINE_LIB is not set" in result.report["text"]


@pytest.mark.rest
@pytest.mark.timeout(90)
def test_mpi_on_one_of_the_workers_is_an_error_in_processes(local_cluster):
    """As if mpirun did not pass the variable to other hosts."""

    def one_has_mpi():
        import json
        import os

        import jax

        import replicax as rx
        from replicax.testing import report

        if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == 1:
            os.environ |= {"MPITRAMPOLINE_LIB": "libmpiwrapper.so", "OMPI_COMM_WORLD_SIZE": "2"}
            jax.config.update("jax_cpu_collectives_implementation", "mpi")
        try:
            rx.MultiWorkerMirroredStrategy()
        except rx.errors.ClusterStartError as error:
            report(text=str(error))

    cluster = local_cluster(2)
    cluster.start(one_has_mpi)
    for result in cluster.wait().values():
        text = result.report["text"]
        assert "CPU collectives by gloo, and worker 1 has jax" in text
        assert "CPU collectives by mpi: " in text


@pytest.mark.parametrize(
    ("ending", "code", "printed"),
    [
        ("pass", 0, "handled\nfinalized\n"),
        ("sys.exit(3)", 3, "handled\nfinalized\n"),
        ("1/0", 1, "handled\n"),
    ],
)
def test_only_an_error_leaves_without_finalizing(ending, code, printed):
    program = f"""
import atexit, sys
from replicax._src import jax_compat
atexit.register(print, "finalized")
atexit.register(jax_compat._leave_mpi_after_error)
atexit.register(print, "handled")
{ending}
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (code, printed), done.stderr

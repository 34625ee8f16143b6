"""Which resolver is chosen in recorded environments, and why the others are not."""

import json
import os

import pytest

from checks import message
from replicax import errors
from replicax.cluster_resolver import (
    JaxClusterResolver,
    OpenMPIClusterResolver,
    SageMakerClusterResolver,
    SimpleClusterResolver,
    SlurmClusterResolver,
    TFConfigClusterResolver,
    TorchrunClusterResolver,
    choose_resolver,
)

TF_CONFIG = {
    "TF_CONFIG": json.dumps({"cluster": {"worker": ["a:1", "b:1"]}, "task": {"type": "worker", "index": 1}})
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "n0", "MASTER_PORT": "29500", "LOCAL_RANK": "0"}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "PMIX_NAMESPACE": "prterun-n0-77@1",
}
SLURM_JOB = {"SLURM_JOB_ID": "134", "SLURM_NTASKS": "2", "SLURM_JOB_NODELIST": "n[0-1]", "SLURM_PROCID": "0"}
SLURM = {
    **SLURM_JOB,
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "n[0-1]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
}
JAX = {"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2", "JAX_COORDINATOR_ADDRESS": "n0:29500"}
SAGEMAKER = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
NAMES = ["TF_CONFIG", "torchrun", "Open MPI", "Slurm", "JAX", "SageMaker", "Kubernetes"]


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


# --- complete -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "kind", "name", "reason", "leader", "local_rank"),
    [
        (TF_CONFIG, TFConfigClusterResolver, "TF_CONFIG", "TF_CONFIG is set.", "a:1", None),
        (TORCHRUN, TorchrunClusterResolver, "torchrun", "RANK=1 and WORLD_SIZE=2", "n0:25404", 0),
        (OPEN_MPI, OpenMPIClusterResolver, "Open MPI", "OMPI_COMM_WORLD_SIZE=2", "n0:20557", 1),
        (SLURM, SlurmClusterResolver, "Slurm", "SLURM_STEP_NUM_TASKS=2", "n0:22624", 0),
        (JAX, JaxClusterResolver, "JAX", "JAX_PROCESS_ID=1 and JAX_NUM_PROCESSES=2", "n0:29500", None),
        (SAGEMAKER, SageMakerClusterResolver, "SageMaker", "2 hosts", "algo-1:2223", None),
    ],
    ids=["TF_CONFIG", "torchrun", "Open MPI", "Slurm", "JAX", "SageMaker"],
)
def test_chosen_launchers(environ, kind, name, reason, leader, local_rank):
    choice = choose_resolver(dict(environ))
    assert type(choice.resolver) is kind
    assert choice.name == name
    assert reason in choice.reason
    assert choice.local_rank == local_rank
    me = choice.membership
    assert (me.num_workers, me.id_in_cluster, me.leader_address) == (2, 1, leader)
    assert [candidate.name for candidate in choice.passed_over] == NAMES[: NAMES.index(name)]
    for candidate in choice.passed_over:
        assert candidate.why.endswith(".")
        assert not candidate.is_partial


def test_the_inner_launcher_is_chosen():
    environ = {}
    for more, name in [
        (SAGEMAKER, "SageMaker"),
        (JAX, "JAX"),
        (SLURM, "Slurm"),
        (OPEN_MPI, "Open MPI"),
        (TORCHRUN, "torchrun"),
        (TF_CONFIG, "TF_CONFIG"),
    ]:
        environ.update(more)
        assert choose_resolver(dict(environ)).name == name


def test_nothing():
    choice = choose_resolver({"HOME": "/root", "PATH": "/bin"})
    assert type(choice.resolver) is SimpleClusterResolver
    assert choice.name == "none"
    assert "one worker on its own" in choice.reason
    assert (choice.membership.num_workers, choice.membership.is_chief) == (1, True)
    assert [candidate.name for candidate in choice.passed_over] == NAMES


def test_it_reads_this_process(monkeypatch):
    for name in [name for name in os.environ if name.startswith(("SLURM_", "SM_", "OMPI_", "JAX_"))] + list(
        TORCHRUN
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_CONFIG", TF_CONFIG["TF_CONFIG"])
    assert choose_resolver().name == "TF_CONFIG"


# --- one worker ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["{}", '{"cluster": {}}', '{"task": {"type": "worker", "index": 0}}'])
def test_tf_config_without_a_cluster_says_one_worker(text):
    choice = choose_resolver({**SLURM, "TF_CONFIG": text})
    assert choice.name == "TF_CONFIG"
    assert "no cluster: one worker on its own" in choice.reason
    assert choice.membership.num_workers == 1


def test_tf_config_that_is_blank_says_nothing():
    choice = choose_resolver({**SLURM, "TF_CONFIG": " "})
    assert choice.name == "Slurm"
    assert choice.passed_over[0].why == "TF_CONFIG is set to nothing."


def test_inner_launcher_of_one_process_is_chosen():
    one = {**TORCHRUN, "RANK": "0", "WORLD_SIZE": "1"}
    choice = choose_resolver({**SLURM, **one})
    assert (choice.name, choice.membership.num_workers) == ("torchrun", 1)


@pytest.mark.parametrize(
    ("environ", "name", "why"),
    [
        (SLURM_JOB, "Slurm", "not in a step: srun starts one"),
        ({**SLURM, "SLURM_STEP_NUM_TASKS": "1"}, "Slurm", "one task"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-1"}, "SageMaker", "one host"),
        ({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, "Kubernetes", "set TF_CONFIG in the manifest"),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1"}, "torchrun", "RANK, WORLD_SIZE are not"),
        ({"JAX_COORDINATOR_ADDRESS": "a:1"}, "JAX", "JAX_PROCESS_ID, JAX_NUM_PROCESSES are not"),
        ({"WORLD_SIZE": "1"}, "torchrun", "WORLD_SIZE is set, and RANK, MASTER_ADDR, MASTER_PORT are not"),
    ],
)
def test_launchers_that_are_not_chosen(environ, name, why):
    choice = choose_resolver(dict(environ))
    assert choice.name == "none"
    assert why in next(candidate.why for candidate in choice.passed_over if candidate.name == name)


# --- partial and malformed ----------------------------------------------------------------------------

PARTIAL = [
    (
        without(TORCHRUN, "WORLD_SIZE"),
        ["torchrun: RANK, MASTER_ADDR, MASTER_PORT are set, and WORLD_SIZE is not."],
    ),
    (without(TORCHRUN, "RANK"), ["WORLD_SIZE, MASTER_ADDR, MASTER_PORT are set, and RANK is not."]),
    (without(TORCHRUN, "MASTER_ADDR"), ["MASTER_ADDR is not."]),
    ({"RANK": "0"}, ["RANK is set, and WORLD_SIZE, MASTER_ADDR, MASTER_PORT are not."]),
    (without(OPEN_MPI, "OMPI_COMM_WORLD_SIZE"), ["Open MPI: OMPI_COMM_WORLD_RANK is set"]),
    (without(SLURM, "SLURM_PROCID"), ["Slurm: ", "SLURM_PROCID is not"]),
    (without(SLURM, "SLURM_STEP_NODELIST"), ["SLURM_STEP_NODELIST is not."]),
    (without(JAX, "JAX_PROCESS_ID"), ["JAX: JAX_NUM_PROCESSES, JAX_COORDINATOR_ADDRESS are set"]),
    ({"JAX_NUM_PROCESSES": "2"}, ["JAX_PROCESS_ID, JAX_COORDINATOR_ADDRESS are not."]),
    (without(SAGEMAKER, "SM_HOSTS"), ["SageMaker: SM_CURRENT_HOST is set, and SM_HOSTS is not."]),
]


@pytest.mark.parametrize(("environ", "says"), PARTIAL)
def test_incomplete_cluster_is_an_error(environ, says):
    message(
        errors.ClusterEnvironmentError,
        lambda: choose_resolver(dict(environ)),
        "The environment describes a cluster in part: ",
        "Set what is missing, or unset the rest",
        *says,
    )


@pytest.mark.parametrize(("environ", "says"), PARTIAL)
def test_incomplete_cluster_is_skipped_if_another_is_complete(environ, says):
    complete = (
        SLURM
        if "RANK" in environ or "WORLD_SIZE" in environ or "OMPI_COMM_WORLD_RANK" in environ
        else TF_CONFIG
    )
    choice = choose_resolver({**environ, **complete})
    assert choice.membership.num_workers == 2
    assert choice.name in ("Slurm", "TF_CONFIG")


@pytest.mark.parametrize(
    ("environ", "error", "says"),
    [
        ({"TF_CONFIG": "{"}, errors.ClusterEnvironmentError, ["TF_CONFIG is not JSON"]),
        ({"TF_CONFIG": '{"cluster": []}'}, errors.ClusterEnvironmentError, ['"cluster" in TF_CONFIG']),
        (
            {"TF_CONFIG": '{"cluster": {"worker": ["a:1"]}}'},
            errors.TaskError,
            ["When `cluster_spec` is given", "TF_CONFIG"],
        ),
        ({**TORCHRUN, "RANK": "7"}, errors.ClusterEnvironmentError, ["RANK=7"]),
        (
            {**OPEN_MPI, "PMIX_NAMESPACE": ""},
            errors.ClusterEnvironmentError,
            ["the host of rank 0 is not known"],
        ),
        ({**SLURM, "SLURM_STEP_NODELIST": "n["}, errors.ClusterEnvironmentError, ["Invalid hostlist format"]),
        (
            {**SLURM, "SLURM_STEP_NUM_TASKS": "x"},
            errors.ClusterEnvironmentError,
            ["SLURM_STEP_NUM_TASKS='x'"],
        ),
        (
            {**SAGEMAKER, "SM_CURRENT_HOST": "algo-9"},
            errors.ClusterEnvironmentError,
            ["'algo-9' is not one of"],
        ),
    ],
)
def test_malformed_cluster_is_an_error_even_if_another_is_complete(environ, error, says):
    message(error, lambda: choose_resolver(dict(environ)), *says)


# --- ports --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "leader"),
    [(TORCHRUN, "n0:4000"), (OPEN_MPI, "n0:4000"), (SLURM, "n0:4000"), (SAGEMAKER, "algo-1:4000")],
)
def test_port_of_the_user(environ, leader):
    assert choose_resolver({**environ, "REPLICAX_PORT": "4000"}).membership.leader_address == leader


def test_slurm_jobs_on_one_node_get_different_ports():
    ports = {
        choose_resolver({**SLURM, "SLURM_JOB_ID": str(job)}).membership.leader_address for job in range(512)
    }
    assert len(ports) == 512

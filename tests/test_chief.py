"""``rx.is_chief``: one process of each job, for every description of the cluster."""

import json
import subprocess
import sys

import pytest

import replicax as rx
from checks import in_a_process_of_its_own
from replicax._src.cluster import chief
from replicax.cluster_resolver import ClusterSpec, SimpleClusterResolver

LAUNCHERS = [
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "SM_HOSTS",
]
LAUNCHERS += ["SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "SM_CURRENT_HOST"]
LAUNCHERS += ["JAX_PROCESS_ID", "JAX_NUM_PROCESSES", "JAX_COORDINATOR_ADDRESS"]
WORKERS = {"worker": ["a:1", "b:1", "c:1"]}
WITH_CHIEF = {"chief": ["d:1"], **WORKERS}
WITH_SERVERS = {**WITH_CHIEF, "ps": ["e:1", "f:1"]}
JOBS = {
    "workers": (WORKERS, [], "worker 0"),
    "a chief": (WITH_CHIEF, [], "chief 0"),
    "an evaluator": (WORKERS, ["evaluator"], "worker 0"),
    "a coordinator": (WITH_SERVERS, [], "chief 0"),
    "servers and no chief": ({**WORKERS, "ps": ["e:1"]}, [], "worker 0"),
}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(chief, "_roles", [])
    monkeypatch.setattr(chief, "_number_for_jax", lambda: None)


def tasks(cluster, others):
    return [(job, n) for job in cluster for n in range(len(cluster[job]))] + [(job, 0) for job in others]


@pytest.mark.parametrize("job", JOBS)
def test_one_task_of_a_job_is_the_chief(monkeypatch, job):
    cluster, others, expected = JOBS[job]
    found = []
    for kind, index in tasks(cluster, others):
        config = {"cluster": cluster, "task": {"type": kind, "index": index}}
        monkeypatch.setenv("TF_CONFIG", json.dumps(config))
        if rx.is_chief():
            found.append(f"{kind} {index}")
    assert found == [expected]


ENVIRONMENTS = {
    "torchrun": lambda n: {"RANK": n, "WORLD_SIZE": 3, "MASTER_ADDR": "a", "MASTER_PORT": 1},
    "Open MPI": lambda n: {
        "OMPI_COMM_WORLD_RANK": n,
        "OMPI_COMM_WORLD_SIZE": 3,
        "OMPI_COMM_WORLD_LOCAL_RANK": n,
        "OMPI_COMM_WORLD_LOCAL_SIZE": 3,
    },
    "JAX": lambda n: {
        "JAX_PROCESS_ID": n,
        "JAX_NUM_PROCESSES": 3,
        "JAX_COORDINATOR_ADDRESS": "a:1",
    },
    "SageMaker": lambda n: {"SM_HOSTS": '["algo-1", "algo-2", "algo-3"]', "SM_CURRENT_HOST": f"algo-{n + 1}"},
}


@pytest.mark.parametrize("launcher", ENVIRONMENTS)
def test_one_process_of_a_launcher_is_the_chief(monkeypatch, launcher):
    found = []
    for number in range(3):
        for name, value in ENVIRONMENTS[launcher](number).items():
            monkeypatch.setenv(name, str(value))
        found.append(rx.is_chief())
    assert found == [True, False, False]


@pytest.mark.parametrize("job", JOBS)
def test_resolver_of_a_strategy_counts(job):
    cluster, others, expected = JOBS[job]
    found = []
    for kind, index in tasks(cluster, others):
        resolver = SimpleClusterResolver(ClusterSpec(cluster), task_type=kind, task_id=index)
        membership = rx._src.cluster.resolver.membership_of(resolver)
        chief.note_role(resolver, membership.is_chief)
        if rx.is_chief():
            found.append(f"{kind} {index}")
    assert found == [expected]


def test_strategies_of_one_process_change_nothing(monkeypatch):
    """Each process of a launched job may have a strategy for its own devices."""
    config = {"cluster": WORKERS, "task": {"type": "worker", "index": 1}}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    with rx.MirroredStrategy(["cpu:0"]).scope():
        assert not rx.is_chief()
    chief.note_role(SimpleClusterResolver(ClusterSpec({})), True)
    assert not rx.is_chief()


def test_configuration_of_jax_counts(monkeypatch):
    monkeypatch.setattr(chief, "_number_for_jax", lambda: 1)
    assert not rx.is_chief()


def test_a_wrong_environment_is_an_error(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{")
    with pytest.raises(rx.errors.ClusterError):
        rx.is_chief()


def test_it_does_not_need_jax():
    program = """
    import sys
    import replicax as rx
    assert rx.is_chief()
    assert "jax" not in sys.modules
    """
    in_a_process_of_its_own(program, TF_CONFIG="")


@pytest.mark.rest
@pytest.mark.timeout(150)
def test_one_worker_of_two_processes_prints(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import replicax as rx\nbefore = rx.is_chief()\nstrategy = rx.MultiWorkerMirroredStrategy()\n"
        "assert rx.is_chief() == before\nwith strategy.scope():\n    assert rx.is_chief() == before\n"
        "print('chief' if before else 'other')\n"
    )
    command = [
        sys.executable,
        "-m",
        "replicax",
        "launch",
        "--workers",
        "2",
        "--devices-per-worker",
        "1",
        str(script),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    said = [line.rpartition("| ")[2] for line in done.stdout.splitlines()]
    assert (said.count("chief"), said.count("other")) == (1, 1)

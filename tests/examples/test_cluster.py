"""examples/cluster, checked without a cluster: the manifests are those that the command prints, and the Slurm script and
the Ray program really train, on this machine."""

import concurrent.futures
import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from checks import path_of_programs
from replicax.__main__ import main
from replicax.cluster_resolver import choose_resolver

ROOT = pathlib.Path(__file__).parents[2]
CLUSTER = ROOT / "examples" / "cluster"
LAST_EPOCH = re.compile(r"epoch 2/2   train loss (\S+) accuracy (\S+)   test loss (\S+) accuracy (\S+)")


def memberships(environments):
    """Checks the tasks of a job: each is itself, and all see the same cluster."""
    found = [choose_resolver(environment).membership for environment in environments]
    assert [m.task.index for m in found] == list(range(len(found)))
    assert len({m.addresses for m in found}) == 1
    assert [m.is_chief for m in found] == [True] + [False] * (len(found) - 1)
    return found


# --- Kubernetes -----------------------------------------------------------------------------------------

# tests/cli/test_on_kubernetes.py checks what the command prints, and tests/engines/test_kubernetes.py the schemas.


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_manifest_is_what_its_comment_prints(file, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (CLUSTER / file).read_text()
    command = re.search(r"^#   replicax (launch .*\\)\n#( .*)$", text, re.MULTILINE)
    assert main([*command[1].removesuffix("\\").split(), *command[2].split()]) == 0
    _, job = yaml.safe_load_all(capsys.readouterr().out)
    assert yaml.safe_load(text) == job
    assert (ROOT / command[2].split()[0]).is_file()


# --- Slurm ----------------------------------------------------------------------------------------------

# Replaces Slurm's srun: starts the tasks of a step here, with the variables of Slurm 23; each node is a loopback
# address.
SRUN = """
import os, subprocess, sys

first = sys.argv.index("python3")
options, command = sys.argv[1:first], [sys.executable, *sys.argv[first + 1:]]
if os.environ.get("FAIL_FIRST") and os.environ["REPLICAX_RESTART_COUNT"] == "0":
    sys.exit(7)
nodes, tasks = int(os.environ["SLURM_JOB_NUM_NODES"]), []
for rank in range(nodes):
    own = {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
        "SLURM_NTASKS": str(nodes), "SLURM_STEP_NUM_TASKS": str(nodes), "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": f"127.0.0.[1-{nodes}]", "SLURM_STEP_TASKS_PER_NODE": f"1(x{nodes})",
        "SLURMD_NODENAME": f"127.0.0.{rank + 1}",
    }
    for option in options:
        if option.startswith("--distribution="):
            own["SLURM_DISTRIBUTION"] = option.partition("=")[2]
    tasks.append(subprocess.Popen(command, env={**os.environ, **own}))
sys.exit(max(task.wait() for task in tasks))
"""


def sbatch(tmp_path, *arguments, **environment):
    """Runs the script as sbatch runs it: a copy, in the folder where it was submitted, with the job's variables."""
    script = CLUSTER / "slurm.sh"
    directives = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", script.read_text(), re.MULTILINE))
    assert directives["ntasks-per-node"] == "1"
    (tmp_path / "srun").write_text(f"#!{sys.executable}\n{SRUN}")
    (tmp_path / "srun").chmod(0o755)
    (tmp_path / "slurm_script").write_text(script.read_text())
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    return subprocess.run(
        ["bash", str(tmp_path / "slurm_script"), *arguments],
        cwd=ROOT,
        env={
            **inherited,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path_of_programs(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "SLURM_JOB_ID": str(os.getpid()),
            "SLURM_JOB_NUM_NODES": directives["nodes"],
            "SLURM_JOB_NODELIST": f"127.0.0.[1-{directives['nodes']}]",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )


@pytest.fixture(scope="module")
def one_process():
    """The losses and accuracies of the last epoch, on one device."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "digits.py", "--devices", "2", "--epochs", "2"],
        env={
            **os.environ,
            "PYTHONPATH": path_of_programs(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "TF_CONFIG": "",
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return numbers_of(done.stdout)


def numbers_of(output):
    (numbers,) = LAST_EPOCH.findall(output)  # one worker prints
    return [float(number) for number in numbers]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_slurm_trains_in_processes(tmp_path, one_process):
    """The second time, the first step fails, and the script restarts all."""
    done = sbatch(tmp_path, "--epochs", "2", FAIL_FIRST="1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("the step ended with exit code 7\n")
    assert numbers_of(done.stdout) == pytest.approx(one_process, abs=2e-3)
    assert "MultiWorkerMirroredStrategy" in done.stdout


@pytest.mark.rest
def test_slurm_ends_with_the_code_of_the_last_step(tmp_path):
    done = sbatch(tmp_path, FAIL_FIRST="1", MAX_RESTARTS="0")
    assert (done.returncode, done.stdout) == (7, "the step ended with exit code 7\n"), done.stderr


# --- Ray ------------------------------------------------------------------------------------------------


@pytest.fixture
def on_ray():
    specification = importlib.util.spec_from_file_location("on_ray", CLUSTER / "on_ray.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_ray_gives_each_task_its_tf_config(on_ray):
    configs = on_ray.tf_configs(["10.0.0.1:4000", "10.0.0.2:4001", "10.0.0.2:4002"])
    for membership in memberships([{"TF_CONFIG": config} for config in configs]):
        assert membership.addresses == ("10.0.0.1:4000", "10.0.0.2:4001", "10.0.0.2:4002")


@pytest.fixture
def run_by_tasks(on_ray, monkeypatch):
    """Runs a command as two workers, by threads in place of Ray's actors: Ray itself is not in the lock file."""
    monkeypatch.setenv("PYTHONPATH", path_of_programs(ROOT / "src"))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")

    def run(*command):
        tasks = [on_ray.Task(), on_ray.Task()]
        configs = on_ray.tf_configs([task.address("127.0.0.1") for task in tasks])
        with concurrent.futures.ThreadPoolExecutor() as pool:
            return list(pool.map(lambda task, config: task.run(command, config), tasks, configs))

    return run


SUM = """
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
print(f"worker {strategy.cluster_resolver.task_id}: {strategy.reduce('SUM', ones, axis=None)}")
"""


@pytest.mark.timeout(240)
@pytest.mark.rest
def test_what_ray_runs_is_one_cluster_in_processes(run_by_tasks, tmp_path, capfd):
    (tmp_path / "sum.py").write_text(SUM)
    assert run_by_tasks(str(tmp_path / "sum.py")) == [0, 0]
    lines = re.findall(r"worker \d: [\d.]+", capfd.readouterr().out)  # the two may write into one line
    assert sorted(lines) == ["worker 0: 2.0", "worker 1: 2.0"]


@pytest.mark.long
@pytest.mark.timeout(240)
def test_what_ray_runs_trains_in_processes(run_by_tasks, capfd, one_process):
    digits = str(ROOT / "examples" / "digits.py")
    assert run_by_tasks(digits, "--strategy", "auto", "--epochs", "2") == [0, 0]
    assert numbers_of(capfd.readouterr().out) == pytest.approx(one_process, abs=2e-3)


@pytest.mark.timeout(300)
@pytest.mark.rest
def test_ray_itself_in_processes():
    pytest.importorskip("ray")
    done = subprocess.run(
        [sys.executable, CLUSTER / "on_ray.py", "--", ROOT / "examples" / "digits.py", "--epochs", "2"],
        env={**os.environ, "PYTHONPATH": path_of_programs(ROOT / "src"), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "worker 1 ended with exit code 0" in done.stdout
    assert "MultiWorkerMirroredStrategy" in done.stdout + done.stderr

"""examples/cluster, checked without a cluster: the manifests are those that the command prints, and the Slurm script and
the function of the Ray program really train, on this machine."""

import itertools
import json
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

# tests/launch/test_on_kubernetes.py checks what the command prints, and tests/engines/test_kubernetes.py the schemas.


@pytest.mark.parametrize("file", ["jobset.yaml", "trainjob.yaml"])
def test_manifest_is_what_its_comment_prints(file, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    text = (CLUSTER / file).read_text()
    command = re.search(r"^#   replicax (launch .*\\)\n#( .*)$", text, re.MULTILINE)
    assert main([*command[1].removesuffix("\\").split(), *command[2].split()]) == 0
    _, job = json.loads(capsys.readouterr().out)["items"]
    assert yaml.safe_load(text) == job
    assert (ROOT / command[2].split()[0]).is_file()


# --- Slurm ----------------------------------------------------------------------------------------------

# Replaces Slurm's srun: starts the tasks of a step here, with the variables of Slurm 23; each node is a loopback
# address.
SRUN = """
import os, subprocess, sys

first = sys.argv.index("python3")
assert "--distribution=block" in sys.argv[:first]
tasks = []
for rank in range(2):
    own = {
        "SLURM_PROCID": str(rank), "SLURM_LOCALID": "0", "SLURM_NODEID": str(rank),
        "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "127.0.0.[1-2]", "SLURM_STEP_TASKS_PER_NODE": "1(x2)",
        "SLURMD_NODENAME": f"127.0.0.{rank + 1}", "SLURM_DISTRIBUTION": "block",
    }
    tasks.append(subprocess.Popen([sys.executable, *sys.argv[first + 1:]], env={**os.environ, **own}))
sys.exit(max(task.wait() for task in tasks))
"""


def test_the_script_is_what_launch_prints(capsys, monkeypatch):
    """With python3 as Python, and with the arguments of the script."""
    monkeypatch.chdir(ROOT)
    options = "--nodes 2 --time 30 --max-restarts 3 --sbatch cpus-per-task=4 --dry-run"
    command = "examples/digits.py --strategy auto"
    assert main(["launch", "--on", "slurm", *options.split(), *command.split()]) == 0
    printed = capsys.readouterr().out.replace(sys.executable, "python3").replace(command, f'{command} "$@"')
    lines = (CLUSTER / "slurm.sh").read_text().splitlines()
    is_ours = [line.startswith("# ") for line in lines[:10]]
    assert [line for line, ours in itertools.zip_longest(lines, is_ours) if not ours] == printed.splitlines()


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
    for name, text in {"srun": f"#!{sys.executable}\n{SRUN}", "squeue": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    done = subprocess.run(
        ["bash", CLUSTER / "slurm.sh", "--epochs", "2"],
        cwd=ROOT,
        env={
            **inherited,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": path_of_programs(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
            "SLURM_JOB_ID": str(os.getpid()),
        },
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert numbers_of(done.stdout) == pytest.approx(one_process, abs=2e-3)
    assert "MultiWorkerMirroredStrategy" in done.stdout


# --- groups -----------------------------------------------------------------------------------------------

# The groups end only when the syncer has said its arguments: the script ends it after them
GROUP_SRUN = """#!/bin/bash
case "$*" in *"replicax server"*) echo "syncer $*"; touch "$SYNCER_RUNS"; while :; do sleep 0.05; done ;; esac
until [ -e "$SYNCER_RUNS" ]; do sleep 0.05; done
echo "group $REPLICAX_GROUP $REPLICAX_SYNCERS $REPLICAX_CHECKPOINT_DIR ${#REPLICAX_TOKEN} $*"
[ "$REPLICAX_GROUP" = 0/2 ] || exit 7
"""


def test_groups_on_slurm_have_their_number_and_the_syncers(tmp_path):
    names = "#!/bin/sh\nprintf 'n%s\\n' 0 1 2 3 4\n"
    for name, text in {"srun": GROUP_SRUN, "scontrol": names}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        ["bash", CLUSTER / "groups.sh", "train.py"],
        env={
            **os.environ,
            "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
            "SLURM_JOB_NODELIST": "n[0-4]",
            "SYNCER_RUNS": str(tmp_path / "syncer_runs"),
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 7, done.stderr
    groups = sorted(line for line in done.stdout.splitlines() if line.startswith("group"))
    for number, (line, nodes) in enumerate(zip(groups, ("n1,n2", "n3,n4"), strict=True)):
        assert line.startswith(f"group {number}/2 n0:12345 saved/group-{number} 32 ")
        assert f"--nodelist={nodes} " in line
        assert line.endswith("replicax run train.py")
    assert '--cluster {"ps": ["n0:12345"]}' in done.stdout


def test_syncer_on_kubernetes_has_the_address_of_its_pod():
    service, syncers = yaml.safe_load_all((CLUSTER / "syncers.yaml").read_text())
    (container,) = syncers["spec"]["template"]["spec"]["containers"]
    environment = {each["name"]: each.get("value") for each in container["env"]}
    membership = choose_resolver(environment).membership
    assert str(membership.task) == "ps 0"
    assert membership.address == f"{syncers['metadata']['name']}-0.{service['metadata']['name']}:12345"


# --- Ray ------------------------------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.rest
def test_program_for_ray_trains_in_launched_workers(tmp_path):
    """The training function, in two workers without Ray; tests/engines/test_ray.py runs the program on Ray."""
    program = f"import runpy; train = runpy.run_path({str(CLUSTER / 'ray_train.py')!r})['train']"
    (tmp_path / "train.py").write_text(
        f"{program}\nprint(train({{'checkpoints': {str(tmp_path / 'c')!r}}}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", "2", str(tmp_path / "train.py")],
        env={
            **{name: value for name, value in os.environ.items() if name != "TF_CONFIG"},
            "PYTHONPATH": path_of_programs(ROOT / "src"),
            "JAX_PLATFORMS": "cpu",
        },
        capture_output=True,
        text=True,
        timeout=220,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("[0.5457, 0.4918, 0.4448]") == 2

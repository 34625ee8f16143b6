"""examples/cluster, checked without a cluster: the tasks of each manifest form the right cluster, the fields are those
of the schemas, and the Slurm script and the function of the Ray program really train, on this machine."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import yaml

from checks import path_of_programs
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


def container_of(pod_template):
    (container,) = pod_template["spec"]["containers"]
    return container


def command_runs_digits(command):
    assert [os.path.basename(command[0])[:6], *command[1:]] == [
        "python",
        "examples/digits.py",
        "--strategy",
        "auto",
    ]
    assert (ROOT / command[1]).is_file()


# --- Kubernetes: a JobSet -------------------------------------------------------------------------------


@pytest.fixture
def jobset():
    return yaml.safe_load((CLUSTER / "jobset.yaml").read_text())


def pods_of(jobset):
    """The names and environments of the pods that JobSet v1alpha2 and the Job controller create.

    Hosts are <JobSet>-<replicated job>-<job>-<pod>.<subdomain>, which is the JobSet's name by default; the annotation
    batch.kubernetes.io/job-completion-index is the number of an indexed job's pod; $(NAME) in the value of a variable is
    another one, before it in the list.
    """
    name, network = jobset["metadata"]["name"], jobset["spec"]["network"]
    assert network["enableDNSHostnames"]
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = replicated["template"]["spec"]
        assert job["completionMode"] == "Indexed"
        assert job["parallelism"] == job["completions"]
        for number in range(replicated["replicas"]):
            for index in range(job["completions"]):
                host = f"{name}-{replicated['name']}-{number}-{index}.{network.get('subdomain', name)}"
                yield host, environment_of(container_of(job["template"]), index)


def environment_of(container, completion_index):
    environment = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for variable in container["env"]:
        if "valueFrom" in variable:
            path = variable["valueFrom"]["fieldRef"]["fieldPath"]
            assert path == "metadata.annotations['batch.kubernetes.io/job-completion-index']"
            environment[variable["name"]] = str(completion_index)
        else:
            known = dict(environment)
            environment[variable["name"]] = re.sub(
                r"\$\((\w+)\)", lambda match, known=known: known.get(match[1], match[0]), variable["value"]
            )
    return environment


def test_jobset(jobset):
    pods = list(pods_of(jobset))
    for membership in memberships([environment for _, environment in pods]):
        assert [address.rpartition(":")[0] for address in membership.addresses] == [host for host, _ in pods]
    container = container_of(jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["template"])
    (port,) = container["ports"]
    assert membership.addresses[0].endswith(f":{port['containerPort']}")
    command_runs_digits(container["command"])


def test_jobset_starts_all_again_after_a_failure(jobset):
    """It restarts all pods, not a single one, which could not join the others."""
    job = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert (job["backoffLimit"], job["template"]["spec"]["restartPolicy"]) == (0, "Never")
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] > 0


# --- Kubernetes: Kubeflow's TFJob -----------------------------------------------------------------------


@pytest.fixture
def tfjob():
    return yaml.safe_load((CLUSTER / "tfjob.yaml").read_text())


def tf_configs_of(tfjob, namespace):
    """The TF_CONFIG of the training operator (v1.9): a headless service for each pod, and the port called tfjob-port
    of the container called tensorflow."""
    cluster = {}
    for kind, replica in tfjob["spec"]["tfReplicaSpecs"].items():
        container = container_of(replica["template"])
        assert container["name"] == "tensorflow"
        (port,) = (p["containerPort"] for p in container["ports"] if p["name"] == "tfjob-port")
        hosts = (
            f"{tfjob['metadata']['name']}-{kind.lower()}-{index}.{namespace}.svc"
            for index in range(replica["replicas"])
        )
        cluster[kind.lower()] = [f"{host}:{port}" for host in hosts]
    return [
        json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}, "environment": "cloud"})
        for kind, addresses in cluster.items()
        for index in range(len(addresses))
    ]


def test_tfjob(tfjob):
    environments = [{"TF_CONFIG": config} for config in tf_configs_of(tfjob, "ml")]
    for membership in memberships(environments):
        assert membership.addresses == ("digits-worker-0.ml.svc:2222", "digits-worker-1.ml.svc:2222")
    command_runs_digits(container_of(tfjob["spec"]["tfReplicaSpecs"]["Worker"]["template"])["command"])


def test_tfjob_ends_when_all_workers_have(tfjob):
    """By default the job ends with worker 0, and the others are killed; without restarts a failure is final."""
    assert tfjob["spec"]["successPolicy"] == "AllWorkers"
    assert tfjob["spec"]["tfReplicaSpecs"]["Worker"]["restartPolicy"] == "OnFailure"


# --- the fields -----------------------------------------------------------------------------------------

# The fields of the schemas of JobSet v1alpha2 and TFJob v1, and of their Job and Pod, that the manifests may use.
CONTAINER = {
    "name": str,
    "image": str,
    "command": [str],
    "ports": [{"name": str, "containerPort": int}],
    "env": [{"name": str, "value": str, "valueFrom": {"fieldRef": {"fieldPath": str}}}],
    "resources": {"requests": {"cpu": str, "memory": str}, "limits": {"memory": str}},
}
POD = {"spec": {"restartPolicy": str, "containers": [CONTAINER]}}
JOB = {"completionMode": str, "parallelism": int, "completions": int, "backoffLimit": int, "template": POD}
JOBSET = {
    "apiVersion": "jobset.x-k8s.io/v1alpha2",
    "kind": "JobSet",
    "metadata": {"name": str},
    "spec": {
        "network": {"enableDNSHostnames": bool, "subdomain": str},
        "failurePolicy": {"maxRestarts": int},
        "replicatedJobs": [{"name": str, "replicas": int, "template": {"spec": JOB}}],
    },
}
TFJOB = {
    "apiVersion": "kubeflow.org/v1",
    "kind": "TFJob",
    "metadata": {"name": str},
    "spec": {
        "successPolicy": str,
        "runPolicy": {"cleanPodPolicy": str, "backoffLimit": int},
        "tfReplicaSpecs": {"Worker": {"replicas": int, "restartPolicy": str, "template": POD}},
    },
}


def assert_fits(value, schema, path=""):
    if isinstance(schema, dict):
        assert isinstance(value, dict), path
        assert value.keys() <= schema.keys(), f"{path}: {value.keys() - schema.keys()}"
        for key, part in value.items():
            assert_fits(part, schema[key], f"{path}.{key}")
    elif isinstance(schema, list):
        assert isinstance(value, list), path
        for part in value:
            assert_fits(part, schema[0], f"{path}[]")
    else:
        assert type(value) is schema or value == schema, path


@pytest.mark.parametrize(("file", "schema"), [("jobset.yaml", JOBSET), ("tfjob.yaml", TFJOB)])
def test_the_fields_are_those_of_the_schema(file, schema):
    assert_fits(yaml.safe_load((CLUSTER / file).read_text()), schema)


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

"""``replicax launch --on k8s``: the documents that it prints, the clusters of their pods, and what it refuses.
``tests/engines/test_kubernetes.py`` checks the schemas.
"""

import json
import sys
from types import SimpleNamespace

import pytest

from kubernetes_pods import TOKEN, environments_of, pods_of
from replicax.__main__ import main
from replicax._launch import on_kubernetes
from replicax.cluster_resolver import choose_resolver

IMAGE = ["--on", "k8s", "--image", "registry.example.com/digits:1"]
SAVED = ["--checkpoint-dir", "/saved", "--volume-claim", "disk"]


@pytest.fixture(autouse=True)
def no_token(monkeypatch):
    monkeypatch.delenv("REPLICAX_TOKEN", raising=False)


@pytest.fixture
def documents(capsys):
    """Returns the documents that the command prints: the Secret, and the job."""

    def read(*options, command=("examples/digits.py", "--strategy", "auto")):
        assert main(["launch", *IMAGE, "--dry-run", *options, *command]) == 0
        return json.loads(capsys.readouterr().out)["items"]

    return read


@pytest.fixture
def refused(capsys):
    """Returns the message for options that the command refuses."""

    def read(*arguments):
        with pytest.raises(SystemExit) as ended:
            main(["launch", *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err

    return read


def jobs_of(jobset):
    return {job["name"]: job["template"]["spec"] for job in jobset["spec"]["replicatedJobs"]}


# --- a JobSet -------------------------------------------------------------------------------------------


def test_pods_of_workers_form_one_cluster(documents):
    secret, jobset = documents("--workers", "3")
    assert jobset["metadata"] == {"name": "digits"}
    pods = list(pods_of(jobset))
    addresses = tuple(f"{host}:12345" for host, _, _ in pods)
    for index, (_, container, environment) in enumerate(pods):
        membership = choose_resolver(environment).membership
        assert (str(membership.task), membership.addresses) == (f"worker {index}", addresses)
        assert container["command"] == ["python", "examples/digits.py", "--strategy", "auto"]
        assert container["ports"] == [{"containerPort": 12345}]
        assert environment["REPLICAX_TOKEN"] == TOKEN
        assert environment["REPLICAX_RESTART_COUNT"] == "0"
    assert secret["kind"] == "Secret"
    (token,) = (v for v in container["env"] if v["name"] == "REPLICAX_TOKEN")
    reference = token["valueFrom"]["secretKeyRef"]
    assert reference["name"] == secret["metadata"]["name"] == "digits-token"
    assert len(secret["stringData"][reference["key"]]) > 30


def test_output_is_one_list_in_which_a_token_that_looks_like_a_number_is_text(capsys, monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", "12e34")
    assert main(["launch", *IMAGE, "--dry-run", "train.py"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["apiVersion"], printed["kind"]) == ("v1", "List")
    assert printed["items"][0]["stringData"] == {"token": "12e34"}


def test_each_job_has_a_token_of_its_own_unless_one_is_set(documents, monkeypatch):
    assert documents()[0]["stringData"] != documents()[0]["stringData"]
    monkeypatch.setenv("REPLICAX_TOKEN", "mine")
    assert documents()[0]["stringData"] == {"token": "mine"}


def test_all_pods_start_again_together(documents):
    """A failure counts. Exit code 42, or the loss of the pod's node, does not."""
    _, jobset = documents("--workers", "2", "--max-restarts", "3", "--grace-period", "300")
    policy = jobset["spec"]["failurePolicy"]
    assert (policy["maxRestarts"], policy["restartStrategy"]) == (3, "BlockingRecreate")
    (rule,) = policy["rules"]
    assert rule["action"] == "RestartJobSetAndIgnoreMaxRestarts"
    assert rule["onJobFailureReasons"] == ["PodFailurePolicy"]  # the reason that FailJob gives
    job = jobs_of(jobset)["worker"]
    pod = job["template"]["spec"]
    assert (job["backoffLimit"], pod["restartPolicy"], pod["terminationGracePeriodSeconds"]) == (
        0,
        "Never",
        300,
    )
    saved, lost = job["podFailurePolicy"]["rules"]
    assert saved["action"] == lost["action"] == "FailJob"
    assert saved["onExitCodes"] == {"containerName": "replicax", "operator": "In", "values": [42]}
    assert saved["onExitCodes"]["containerName"] == pod["containers"][0]["name"]
    assert lost["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_parameter_servers(documents):
    _, jobset = documents("--workers", "2", "--ps", "2", "--server-restarts", "4", "--gpus-per-worker", "1")
    pods = list(pods_of(jobset))
    found = [choose_resolver(environment).membership for _, _, environment in pods]
    assert [str(m.task) for m in found] == ["chief 0", "worker 0", "worker 1", "ps 0", "ps 1"]
    cluster = {
        kind: [f"digits-{kind}-0-{index}.digits:12345" for index in range(count)]
        for kind, count in {"chief": 1, "worker": 2, "ps": 2}.items()
    }
    for (_, container, environment), membership in zip(pods, found):
        assert json.loads(environment["TF_CONFIG"])["cluster"] == cluster
        is_chief = membership.task.type == "chief"
        assert container["command"][1:3] == (
            ["examples/digits.py", "--strategy"] if is_chief else ["-m", "replicax"]
        )
        has_gpu = container.get("resources") == {"limits": {"nvidia.com/gpu": 1}}
        assert has_gpu == (membership.task.type != "ps")
    assert jobset["spec"]["successPolicy"] == {"operator": "All", "targetReplicatedJobs": ["chief"]}


def test_parameter_servers_without_a_chief_end_with_the_workers(documents):
    _, jobset = documents("--workers", "2", "--ps", "1", "--no-chief")
    assert jobset["spec"]["successPolicy"]["targetReplicatedJobs"] == ["worker"]
    assert (
        jobs_of(jobset)["worker"]["template"]["spec"]["containers"][0]["command"][1] == "examples/digits.py"
    )


def test_this_machines_keras_does_not_matter(documents, tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    (tmp_path / "train.py").write_text("import replicax\nimport keras\n")
    documents(command=(str(tmp_path / "train.py"),))


@pytest.mark.parametrize(("replication", "ps_restarts"), [("1", 0), ("2", 8)])
def test_servers_restart_alone_unless_values_would_be_lost(documents, replication, ps_restarts):
    _, jobset = documents(
        "--workers", "2", "--ps", "2", "--server-restarts", "4", "--replication", replication
    )
    jobs = jobs_of(jobset)
    assert {name: job["backoffLimit"] for name, job in jobs.items()} == {
        "chief": 0,
        "worker": 8,
        "ps": ps_restarts,
    }
    lost = {name: job["podFailurePolicy"]["rules"][1]["action"] for name, job in jobs.items()}
    assert lost == {"chief": "FailJob", "worker": "Ignore", "ps": "Ignore" if ps_restarts else "FailJob"}
    told = {environment.get("REPLICAX_REPLICATION") for _, _, environment in pods_of(jobset)}
    assert told == ({"2"} if ps_restarts else {None})


def test_options_reach_the_pods(documents):
    _, jobset = documents(
        "--name", "other", "--namespace", "ml", "--port", "2222", "--env", "DATA=/data=1", "--devices-per-worker", "2",
        *SAVED, command=("-m", "package.module"),
    )  # fmt: skip
    assert jobset["metadata"] == {"name": "other", "namespace": "ml"}
    ((host, container, environment),) = pods_of(jobset)
    assert host == "other-worker-0-0.other"
    assert container["command"] == ["python", "-m", "package.module"]
    assert choose_resolver(environment).membership.addresses == ("other-worker-0-0.other:2222",)
    assert environment["DATA"] == "/data=1"
    assert (environment["JAX_NUM_CPU_DEVICES"], environment["REPLICAX_CHECKPOINT_DIR"]) == ("2", "/saved")
    (mount,) = container["volumeMounts"]
    (volume,) = jobs_of(jobset)["worker"]["template"]["spec"]["volumes"]
    assert (mount["mountPath"], volume["name"]) == ("/saved", mount["name"])
    assert volume["persistentVolumeClaim"] == {"claimName": "disk"}


# --- a TrainJob -----------------------------------------------------------------------------------------


def test_train_job(documents):
    secret, job = documents("--kind", "trainjob", "--workers", "3", "--gpus-per-worker", "2", *SAVED)
    environments = environments_of(job)
    for index, environment in enumerate(environments):
        choice = choose_resolver(environment)
        assert choice.name == "JAX"
        me = choice.membership
        assert (me.num_workers, me.id_in_cluster) == (3, index)
        assert me.leader_address == "digits-node-0-0.digits:29500"
        assert environment["REPLICAX_TOKEN"] == TOKEN
        assert environment["REPLICAX_CHECKPOINT_DIR"] == "/saved"
    trainer = job["spec"]["trainer"]
    assert trainer["command"] == ["python", "examples/digits.py", "--strategy", "auto"]
    assert trainer["resourcesPerNode"] == {"limits": {"nvidia.com/gpu": 2}}
    (patch,) = job["spec"]["runtimePatches"]
    (node,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = node["template"]["spec"]["template"]["spec"]
    assert (node["name"], pod["terminationGracePeriodSeconds"]) == ("node", 120)
    assert pod["containers"][0]["volumeMounts"][0]["mountPath"] == "/saved"
    assert secret["metadata"]["name"] == "digits-token"


@pytest.mark.parametrize(
    "option", ["--ps=1", "--chief", "--max-restarts=1", "--port=2222", "--replication=2"]
)
def test_train_jobs_refuse_what_their_runtime_decides(refused, option):
    name = option.partition("=")[0]
    assert f"{name} does not go with --kind trainjob" in refused(
        *IMAGE, "--kind", "trainjob", option, "train.py"
    )


# --- what is refused ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "k8s", "train.py"], "--on k8s needs --image"),
        ([*IMAGE, "--workers", "auto", "train.py"], "--workers auto counts the devices of this machine"),
        ([*IMAGE, "--checkpoint-dir", "/saved", "train.py"], "--checkpoint-dir and --volume-claim go together"),
        ([*IMAGE, "--volume-claim", "disk", "train.py"], "--checkpoint-dir and --volume-claim go together"),
        ([*IMAGE, *SAVED, "--checkpoint-dir", "saved", "train.py"], "--checkpoint-dir saved must be an absolute path"),
        ([*IMAGE, "--env", "REPLICAX_TOKEN=a", "train.py"], "--env REPLICAX_TOKEN: the job itself sets this variable"),
        ([*IMAGE, "--env", "TF_CONFIG={}", "train.py"], "--env TF_CONFIG: the job itself"),
        ([*IMAGE, "--env", "TASK_INDEX=1", "train.py"], "--env TASK_INDEX: the job itself"),
        ([*IMAGE, *SAVED, "--env", "REPLICAX_CHECKPOINT_DIR=/a", "train.py"], "--env REPLICAX_CHECKPOINT_DIR: the"),
        ([*IMAGE, "--port", "65536", "train.py"], "'65536' is not a port, which is at most 65535"),
        ([*IMAGE, "--status", "train.py"], "Instead give --env REPLICAX_STATUS_ADDRESS=0.0.0.0:8080"),
        ([*IMAGE, "--name", "Digits", "train.py"], "'Digits' cannot be the name of a job"),
        ([*IMAGE, "--name", "a" * 41, "train.py"], "at most 40"),
        ([*IMAGE, "7.py"], "'7' cannot be the name of a job: give a --name"),
        ([*IMAGE, "--env", "A", "train.py"], "'A' is not NAME=VALUE"),
        ([*IMAGE, "--hosts", "a,b", "train.py"], "--hosts has no meaning with --on k8s, which takes --checkpoint-dir"),
        ([*IMAGE, "--workers", "0", "train.py"], "A cluster needs at least one worker"),
        (["--dry-run", __file__], "--dry-run needs --on"),
        (["--image", "a", __file__], "--image needs --on k8s"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_wrong_options(refused, arguments, says):
    assert says in refused(*arguments)


# --- creating the job -----------------------------------------------------------------------------------


class Client:
    """``kubernetes.client``, which notes what is created."""

    def __init__(self, error=None, refuses="Secret"):
        self.created, self.deleted, self.error, self.refuses = [], [], error, refuses

    def CoreV1Api(self):
        return SimpleNamespace(create_namespaced_secret=self._note, delete_namespaced_secret=self._delete)

    def CustomObjectsApi(self):
        return SimpleNamespace(create_namespaced_custom_object=self._note)

    def _note(self, *arguments):
        if self.error and arguments[-1]["kind"] == self.refuses:
            raise self.error
        self.created.append(arguments)

    def _delete(self, *arguments):
        self.deleted.append(arguments)


def test_it_creates_the_secret_and_the_job(monkeypatch, capsys):
    client = Client()
    monkeypatch.setattr(on_kubernetes, "loaded_client", lambda location, what: client)
    assert main(["launch", *IMAGE, "--workers", "5", "--ps", "2", "train.py"]) == 0
    (namespace, secret), (group, version, where, plural, jobset) = client.created
    assert (namespace, secret["kind"]) == ("default", "Secret")
    assert (group, version, where, plural) == ("jobset.x-k8s.io", "v1alpha2", "default", "jobsets")
    assert jobset["kind"] == "JobSet"
    printed = capsys.readouterr().out
    assert "Created JobSet train in namespace default." in printed
    assert "--tail=-1 --max-log-requests=8 -l" in printed


def test_refusal_of_the_server_is_an_error(monkeypatch, capsys):
    client = Client(RuntimeError("(409)\nReason: Conflict"))
    monkeypatch.setattr(on_kubernetes, "loaded_client", lambda location, what: client)
    assert main(["launch", *IMAGE, "--namespace", "ml", "train.py"]) == 1
    printed = capsys.readouterr().err
    assert (
        "did not create Secret train-token in namespace ml: RuntimeError: (409) Reason: Conflict" in printed
    )


@pytest.mark.parametrize(("refuses", "deleted"), [("JobSet", [("train-token", "ml")]), ("Secret", [])])
def test_a_refused_job_leaves_no_secret(monkeypatch, refuses, deleted):
    """A Secret that was there before stays."""
    client = Client(RuntimeError("(404)"), refuses)
    monkeypatch.setattr(on_kubernetes, "loaded_client", lambda location, what: client)
    assert main(["launch", *IMAGE, "--namespace", "ml", "train.py"]) == 1
    assert client.deleted == deleted


def test_without_the_package(monkeypatch, capsys):
    for name in ("kubernetes", "kubernetes.config", "kubernetes.client"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["launch", *IMAGE, "train.py"]) == 1
    assert "replicax launch --on k8s needs kubernetes" in capsys.readouterr().err

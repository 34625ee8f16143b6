"""Manifests that ``replicax launch --on k8s`` prints, against published schemas, and what talks to an API server, against
an emulator. No API server has run any of them.
"""

import asyncio
import copy
import json
import shutil
import subprocess
import threading

import pytest
import yaml

from kubernetes_pods import pods_of
from replicax.__main__ import main
from replicax.cluster_resolver import KubernetesClusterResolver

kmock = pytest.importorskip("kmock", reason="needs kmock")
models = pytest.importorskip("kubeflow_trainer_api.models", reason="needs kubeflow-trainer-api")
validate = pytest.importorskip("kubernetes_validate", reason="needs kubernetes-validate")

VERSION = "1.37"
IMAGE = ["--on", "k8s", "--image", "registry.example.com/digits:1"]
EVERYTHING = [
    "--namespace", "ml", "--workers", "3", "--gpus-per-worker", "2", "--checkpoint-dir", "/saved", "--volume-claim", "disk",
    "--env", "DATA=/data",
]  # fmt: skip
JOBS = {
    "workers": [],
    "everything": [*EVERYTHING, "--max-restarts", "3"],
    "parameter servers": [*EVERYTHING, "--ps", "2", "--replication", "2"],
}
TRAIN_JOBS = {"workers": [], "everything": EVERYTHING}


def printed(capsys, *options):
    assert main(["launch", *IMAGE, "--dry-run", *options, "examples/digits.py"]) == 0
    return capsys.readouterr().out


def documents(capsys, *options):
    return json.loads(printed(capsys, *options))["items"]


def lost(document, kept):
    """Yields the paths of a document that a model has dropped or changed: it accepts unknown keys, and forgets them."""
    if isinstance(document, dict) and isinstance(kept, dict):
        for key, value in document.items():
            yield from (f".{key}{path}" for path in (lost(value, kept[key]) if key in kept else [""]))
    elif isinstance(document, list) and isinstance(kept, list) and len(document) == len(kept):
        for number, (value, other) in enumerate(zip(document, kept)):
            yield from (f"[{number}]{path}" for path in lost(value, other))
    elif document != kept:
        yield ""


def round_trip(model, document):
    return list(lost(document, getattr(models, model).from_dict(document).to_dict()))


# --- kubectl --------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
@pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
def test_kubectl_reads_the_output_from_a_pipe(capsys):
    """``apply`` itself asks an API server first; with ``--local`` the same reader needs none."""
    done = subprocess.run(
        ["kubectl", "label", "--local", "-f", "-", "read=yes", "-o", "name"],
        input=printed(capsys),
        capture_output=True,
        text=True,
        timeout=30,
        check=True,
    )
    assert done.stdout.split() == ["secret/digits-token", "jobset.jobset.x-k8s.io/digits"]


# --- schemas --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_built_in_kinds_fit_the_schemas_of_kubernetes(capsys, options):
    secret, jobset = documents(capsys, *options)
    validate.validate(secret, VERSION, strict=True)
    for replicated in jobset["spec"]["replicatedJobs"]:
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "job"}, **replicated["template"]}
        validate.validate(job, VERSION, strict=True)
        misspelt = copy.deepcopy(job)
        misspelt["spec"]["template"]["spec"]["terminationGracePeriod"] = 1
        with pytest.raises(validate.ValidationError):
            validate.validate(misspelt, VERSION, strict=True)


@pytest.mark.parametrize("options", JOBS.values(), ids=JOBS)
def test_every_key_of_a_jobset_is_known(capsys, options):
    _, jobset = documents(capsys, *options)
    assert round_trip("JobsetV1alpha2JobSet", jobset) == []
    misspelt = copy.deepcopy(jobset)
    misspelt["spec"]["failurePolicy"]["restartStrategie"] = "Recreate"
    assert round_trip("JobsetV1alpha2JobSet", misspelt) == [".spec.failurePolicy.restartStrategie"]


@pytest.mark.parametrize("options", TRAIN_JOBS.values(), ids=TRAIN_JOBS)
def test_every_key_of_a_train_job_is_known(capsys, options):
    _, job = documents(capsys, "--kind", "trainjob", *options)
    assert round_trip("TrainerV1alpha1TrainJob", job) == []
    misspelt = copy.deepcopy(job)
    misspelt["spec"]["trainer"]["nodes"] = 2
    assert round_trip("TrainerV1alpha1TrainJob", misspelt) == [".spec.trainer.nodes"]


# --- an API server --------------------------------------------------------------------------------------

RESOURCES = {
    "v1/secrets": ("Secret", ["create", "delete", "get"]),
    "v1/pods": ("Pod", ["list"]),
    "jobset.x-k8s.io/v1alpha2/jobsets": ("JobSet", ["create", "get"]),
    "trainer.kubeflow.org/v1alpha1/trainjobs": ("TrainJob", ["create", "get"]),
}


@pytest.fixture
def emulator(tmp_path, monkeypatch):
    """An emulated API server, and a kubeconfig that names it. Its loop runs in a thread, because clients block."""
    server_loop, started, found = asyncio.new_event_loop(), threading.Event(), []

    async def serve():
        async with kmock.KubernetesEmulator() as emulated, kmock.Server(emulated) as server:
            for path, (kind, verbs) in RESOURCES.items():
                emulated.resources[kmock.resource(path)] = {"kind": kind, "namespaced": True, "verbs": verbs}
            ended = asyncio.Event()
            found.extend([emulated, str(server.url), ended])
            started.set()
            await ended.wait()

    thread = threading.Thread(target=server_loop.run_until_complete, args=(serve(),), daemon=True)
    thread.start()
    assert started.wait(60)
    emulated, url, ended = found
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "emulated", "cluster": {"server": url}}],
        "users": [{"name": "me", "user": {}}],
        "contexts": [{"name": "here", "context": {"cluster": "emulated", "user": "me"}}],
        "current-context": "here",
    }
    path = tmp_path / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    monkeypatch.setattr("kubernetes.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    yield emulated
    server_loop.call_soon_threadsafe(ended.set)
    thread.join(60)
    server_loop.close()


@pytest.mark.parametrize(
    ("kind", "path"),
    [("jobset", "jobset.x-k8s.io/v1alpha2/jobsets"), ("trainjob", "trainer.kubeflow.org/v1alpha1/trainjobs")],
)
@pytest.mark.timeout(120)
def test_it_creates_the_secret_and_the_job(emulator, capsys, kind, path):
    assert main(["launch", *IMAGE, "--kind", kind, "--namespace", "ml", "examples/digits.py"]) == 0
    printed = capsys.readouterr().out
    created = emulator.objects[kmock.resource(path), "ml", "digits"]
    secret = emulator.objects[kmock.resource("v1/secrets"), "ml", "digits-token"]
    assert f"Created {created['kind']} digits in namespace ml." in printed
    assert created["spec"]
    assert len(secret["stringData"]["token"]) > 30


@pytest.mark.timeout(120)
def test_refusal_of_the_server_is_an_error(emulator, capsys):
    emulator["post", kmock.resource("jobset.x-k8s.io/v1alpha2/jobsets")] << 404
    assert main(["launch", *IMAGE, "--namespace", "ml", "examples/digits.py"]) == 1
    printed = capsys.readouterr().err
    assert (
        "did not create JobSet digits in namespace ml: NotFoundException: (404) Reason: Not Found" in printed
    )
    assert "If it answered 404, JobSet or Kubeflow Trainer is not installed there" in printed
    assert emulator.objects[kmock.resource("v1/secrets"), "ml", "digits-token"].deleted


@pytest.mark.timeout(120)
def test_resolver_finds_the_pods_of_a_jobset(emulator, capsys):
    _, jobset = documents(capsys, "--workers", "2")
    for number, (host, _, _) in enumerate(pods_of(jobset)):
        name = host.partition(".")[0]
        emulator.objects[kmock.resource("v1/pods"), "ml", name] = {
            "metadata": {"name": name, "namespace": "ml", "labels": {"app": "digits"}},
            "status": {"phase": "Running", "podIP": f"10.0.0.{number}"},
        }
    resolver = KubernetesClusterResolver(
        {"worker": ["app=digits"]}, executable_location="OFF_CLUSTER", namespace="ml"
    )
    assert resolver.cluster_spec() == {"worker": ["10.0.0.0:8470", "10.0.0.1:8470"]}

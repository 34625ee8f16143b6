"""TF_CONFIG: TensorFlow's tfconfig_cluster_resolver_test, and mistakes that people make in it."""

import json

import pytest

from checks import message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax.cluster_resolver import TFConfigClusterResolver

CLUSTER = {"ps": ["ps0:2222", "ps1:2222"], "worker": ["worker0:2222", "worker1:2222", "worker2:2222"]}
CONFIG = {"cluster": CLUSTER, "task": {"type": "ps", "index": 0}}


def resolver(config, **kwargs):
    """The resolver for a TF_CONFIG: a text, or a value that is written as JSON."""
    text = config if isinstance(config, str) else json.dumps(config)
    return TFConfigClusterResolver(**kwargs, environ={"TF_CONFIG": text})


def with_task(**task):
    return {"cluster": CLUSTER, "task": task}


# --- TensorFlow's -------------------------------------------------------------------------------------


def test_cluster_and_task():
    found = resolver({**CONFIG, "rpc_layer": "grpc"})
    assert found.cluster_spec() == CLUSTER
    assert (found.task_type, found.task_id, found.rpc_layer) == ("ps", 0, "grpc")
    assert found.environment is None
    assert resolver(CONFIG, environment="google").environment == "google"
    assert resolver(CONFIG).num_accelerators() == {}


def test_master():
    assert resolver(CONFIG).master() == "ps0:2222"
    assert resolver(CONFIG).master("worker", 1) == "worker1:2222"
    assert resolver({**CONFIG, "session_master": "sessionmaster:2222"}).master() == "sessionmaster:2222"
    assert resolver({**CONFIG, "rpc_layer": "grpc"}).master() == "grpc://ps0:2222"
    assert resolver({}).master() == ""
    assert resolver({"cluster": {"worker": ["worker0:2222"]}}).master() == ""


def test_overrides():
    found = resolver(
        {"cluster": CLUSTER, "rpc_layer": "grpc", "task": {"type": "ps", "index": 1}},
        task_type="ps",
        task_id=0,
    )
    assert found.master() == "grpc://ps0:2222"
    assert (found.task_type, found.task_id) == ("ps", 0)
    found.task_type, found.task_id, found.rpc_layer = "worker", 1, "test"
    assert found.master() == "test://worker1:2222"
    assert (found.task_type, found.task_id, found.rpc_layer) == ("worker", 1, "test")
    assert resolver(with_task(type="worker", index="0"), task_id=1).task_id == 1


def test_casts():
    assert (
        resolver({"cluster": {"123456": ["a:1"]}, "task": {"type": 123456, "index": 0}}).task_type == "123456"
    )
    assert resolver(with_task(type="ps", index="1")).task_id == 1


def test_it_is_read_at_every_access(monkeypatch):
    found = TFConfigClusterResolver()
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert found.task_type is None
    assert not found.cluster_spec()
    monkeypatch.setenv("TF_CONFIG", json.dumps(CONFIG))
    assert found.task_type == "ps"
    assert found.cluster_spec() == CLUSTER
    monkeypatch.setenv("TF_CONFIG", json.dumps(with_task(type="worker", index=2)))
    assert (found.task_type, found.task_id) == ("worker", 2)


@pytest.mark.parametrize(
    "text", [None, "", "  \n", "{}", '{"cluster": {}}', '{"cluster": null, "task": null}']
)
def test_without_a_cluster_it_is_one_worker(text):
    found = TFConfigClusterResolver(environ={} if text is None else {"TF_CONFIG": text})
    assert (found.task_type, found.task_id, found.rpc_layer, found.master()) == (None, None, None, "")
    me = membership_of(found)
    assert (me.num_workers, me.is_chief) == (1, True)


def test_an_evaluator():
    me = membership_of(resolver({"cluster": {"chief": ["c:1"]}, "task": {"type": "evaluator", "index": 0}}))
    assert (me.is_evaluator, me.num_workers) == (True, 1)


def test_variables_of_kubeflow():
    config = {
        "cluster": {"worker": ["job-worker-0.ns.svc:2222", "job-worker-1.ns.svc:2222"]},
        "environment": "cloud",
    }
    me = membership_of(resolver({**config, "task": {"type": "worker", "index": 1}}))
    assert (me.id_in_cluster, me.leader_address) == (1, "job-worker-0.ns.svc:2222")


def test_only_some_tasks_by_index():
    found = resolver({"cluster": {"worker": {"1": "a:1"}}, "task": {"type": "worker", "index": 1}})
    assert found.cluster_spec().task_address("worker", 1) == "a:1"
    message(errors.TaskError, lambda: membership_of(found), "TF_CONFIG", '"worker": {"1": "a:1"}', "gaps")


# --- malformed ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"cluster": {"worker": ["a:1" "b:1"]}}',
            ["Expecting ',' delimiter at line 1, column 31", '["a:1" ⟨here⟩"b:1"]'],
        ),
        (
            "{'cluster': {}}",
            ["Expecting property name", "⟨here⟩'cluster'", "double quotes", "json.dumps(config)"],
        ),
        ("{cluster:{worker:[a:1]}}", ["is not JSON", "quote it in a shell"]),
        ("/etc/tf_config.json", ["is not JSON", "⟨here⟩/etc/tf_config.json"]),
        ('{"cluster": {' + '"worker": ["a:1"], ' * 50, ["is not JSON", "…"]),
    ],
)
def test_not_json(text, says):
    found = resolver(text)
    for read in (found.cluster_spec, found.master, lambda: found.task_type, lambda: found.task_id):
        got = message(errors.ClusterEnvironmentError, read, "TF_CONFIG is not JSON", *says)
        assert len(got) < 500


@pytest.mark.parametrize("value", [[], 3, "worker", None, True], ids=repr)
def test_not_an_object(value):
    message(
        errors.ClusterEnvironmentError,
        resolver(json.dumps(value)).cluster_spec,
        "TF_CONFIG must be a JSON object",
        f"got {json.dumps(value)}",
        '{"cluster": {"worker"',
    )


@pytest.mark.parametrize("cluster", [["a:1", "b:1"], "a:1", 3], ids=repr)
def test_cluster_is_not_an_object(cluster):
    message(
        errors.ClusterEnvironmentError,
        resolver({"cluster": cluster}).cluster_spec,
        '"cluster" in TF_CONFIG must be a JSON object',
        f"got {json.dumps(cluster)}",
    )


def test_tasks_of_a_job_must_be_a_list():
    message(
        errors.ClusterTypeError,
        resolver({"cluster": {"worker": "a:1"}}).cluster_spec,
        "The tasks for job 'worker' must be a list",
        "TF_CONFIG",
    )


def test_repeated_key():
    text = '{"cluster": {"chief": ["a:1"], "worker": ["c:1"], "chief": ["b:1"]}}'
    message(
        errors.ClusterEnvironmentError,
        resolver(text).cluster_spec,
        '"chief" occurs 2 times',
        "TF_CONFIG",
        '"chief": ["a:1"], "chief": ["b:1"]',
    )


@pytest.mark.parametrize("task", [["worker", 0], "worker", 0], ids=repr)
def test_task_is_not_an_object(task):
    found = resolver({"cluster": CLUSTER, "task": task})
    for read in (lambda: found.task_type, lambda: found.task_id):
        message(
            errors.ClusterEnvironmentError,
            read,
            '"task" in TF_CONFIG must be a JSON object',
            json.dumps(task),
        )


@pytest.mark.parametrize("index", ["one", "", "-1", "1.0", "²", 1.0, 0.5, True, -1, [0]], ids=repr)
def test_invalid_index(index):
    found = resolver(with_task(type="worker", index=index))
    message(
        errors.ClusterEnvironmentError,
        lambda: found.task_id,
        '"index" of "task" in TF_CONFIG',
        f"got {json.dumps(index)}",
        json.dumps({"type": "worker", "index": index}),
    )


@pytest.mark.parametrize("task_type", [["worker"], {}, True, 1.5], ids=repr)
def test_invalid_type(task_type):
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(with_task(type=task_type, index=0)).task_type,
        '"type" of "task" in TF_CONFIG',
        f"got {json.dumps(task_type)}",
    )


@pytest.mark.parametrize(
    "task", [{}, {"type": "worker"}, {"index": 1}, {"type": None, "index": None}], ids=repr
)
def test_task_is_incomplete(task):
    message(
        errors.TaskError,
        lambda: membership_of(resolver(with_task(**task))),
        "When `cluster_spec` is given, you must also specify `task_type` and `task_id`.",
        f"the type {task.get('type')!r} and the id {task.get('index')!r}",
        '"task": {"type": "ps", "index": 0}',
    )


@pytest.mark.parametrize(
    ("config", "error", "says"),
    [
        (
            with_task(type="worker", index=3),
            errors.TaskError,
            ["The `task_id` 3 exceeds", '"worker": ["worker0:2222", '],
        ),
        (
            with_task(type="chief", index=0),
            errors.TaskError,
            ["'chief' not found in cluster_spec.", "has ps, worker"],
        ),
        (with_task(type="Worker", index=0), errors.TaskError, ["Unrecognized task_type: Worker"]),
        (
            {"cluster": {"chief": ["a:1", "b:1"]}, "task": {"type": "chief", "index": 1}},
            errors.TaskError,
            ["at most one 'chief' job", '"chief": ["a:1", "b:1"]'],
        ),
        (
            {"cluster": {"worker": ["a:1", "a:1"]}, "task": {"type": "worker", "index": 1}},
            errors.AddressError,
            ["'a:1' occurs 2 times", "worker 0 and worker 1"],
        ),
        (
            {"cluster": {"worker": ["a:1", "b"]}, "task": {"type": "worker", "index": 0}},
            errors.AddressError,
            ["'b' (from worker 1 of TF_CONFIG)", "no port"],
        ),
        (
            {"task": {"type": "worker", "index": 1}},
            errors.TaskError,
            ["The `task_id` 1 exceeds", "Without a list"],
        ),
    ],
)
def test_impossible_clusters(config, error, says):
    message(error, lambda: membership_of(resolver(config)), "TF_CONFIG", *says)

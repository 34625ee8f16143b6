"""The cluster spec is TensorFlow's; invalid specs and addresses raise errors."""

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import message
from replicax import errors
from replicax._src.cluster.spec import join_address, split_address
from replicax.cluster_resolver import UNKNOWN_ADDRESS, ClusterDef, ClusterSpec, JobDef, Membership, Task

FULL = {
    "chief": ["127.0.0.1:1234"],
    "worker": ["127.0.0.1:8964", "127.0.0.1:2333"],
    "ps": ["127.0.0.1:1926", "127.0.0.1:3141"],
}
WORKERS = {"worker": ["127.0.0.1:8964", "127.0.0.1:2333"]}


# --- ClusterSpec --------------------------------------------------------------------------------------


def test_spec_of_lists():
    spec = ClusterSpec(FULL)
    assert spec.as_dict() == FULL
    assert spec.jobs == ["chief", "worker", "ps"]
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [0, 1]
    assert spec.task_address("worker", 1) == "127.0.0.1:2333"
    assert spec.job_tasks("ps") == FULL["ps"]
    assert repr(spec) == (
        "ClusterSpec({'chief': ['127.0.0.1:1234'], 'ps': ['127.0.0.1:1926', '127.0.0.1:3141'], "
        "'worker': ['127.0.0.1:8964', '127.0.0.1:2333']})"
    )


def test_spec_of_some_tasks():
    spec = ClusterSpec({"worker": {1: "b:1", 3: "d:1"}})
    assert spec.as_dict() == {"worker": {1: "b:1", 3: "d:1"}}
    assert spec.num_tasks("worker") == 2
    assert spec.task_indices("worker") == [1, 3]
    assert spec.job_tasks("worker") == [None, "b:1", None, "d:1"]
    assert ClusterSpec({"worker": {"0": "a:1", "1": "b:1"}}).as_dict() == {"worker": ["a:1", "b:1"]}


def test_spec_of_nothing():
    assert not ClusterSpec({})
    assert ClusterSpec({}).as_dict() == {}
    empty_job = ClusterSpec({"worker": []})
    assert empty_job
    assert empty_job.job_tasks("worker") == []
    assert empty_job.as_dict() == {"worker": {}}


def test_specs_are_equal_by_their_tasks():
    assert ClusterSpec(FULL) == ClusterSpec(ClusterSpec(FULL)) == FULL
    assert ClusterSpec({"worker": {0: "a:1"}}) == ClusterSpec({"worker": ("a:1",)})
    assert ClusterSpec(FULL) != ClusterSpec(WORKERS)
    assert ClusterSpec(FULL) != WORKERS
    assert ClusterSpec(FULL) != {"worker": 3}
    assert ClusterSpec(FULL) != "worker"
    assert len({ClusterSpec(FULL), ClusterSpec(FULL), ClusterSpec(WORKERS)}) == 2


def test_specs_remember_where_they_come_from():
    spec = ClusterSpec(FULL, source="TF_CONFIG")
    assert ClusterSpec(spec).source == "TF_CONFIG"
    assert spec == ClusterSpec(FULL)
    message(errors.TaskError, lambda: spec.num_tasks("wrong"), "No such job in cluster: 'wrong'", "TF_CONFIG")


def test_missing_tasks_of_a_spec():
    spec = ClusterSpec(FULL)
    for call in (spec.num_tasks, spec.task_indices, spec.job_tasks, lambda job: spec.task_address(job, 0)):
        text = message(
            errors.TaskError, lambda call=call: call("evaluator"), "No such job in cluster: 'evaluator'"
        )
        assert "chief, worker, ps" in text
    message(
        errors.TaskError,
        lambda: spec.task_address("worker", 2),
        "No task with index 2 in job 'worker'",
        "0, 1",
    )


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (
            ["a:1", "b:1"],
            ["must be a dictionary mapping one or more job names", "got list", "['a:1', 'b:1']"],
        ),
        ("a:1", ["must be a dictionary", "got str"]),
        (None, ["must be a dictionary", "got NoneType"]),
        ({"worker": "a:1"}, ["must be a list or a dictionary from integers to strings", "got str", "'a:1'"]),
        ({"worker": 3}, ["The tasks for job 'worker'", "got int", '"worker": ["host:port"]']),
        ({"worker": [3]}, ["Task address 3 must be bytes or unicode", "in job 'worker'"]),
        ({"worker": [["a:1"]]}, ["Task address ['a:1'] must be bytes or unicode"]),
        ({"worker": {"first": "a:1"}}, ["the key 'first'", "whole numbers from 0"]),
        ({"worker": {-1: "a:1"}}, ["the key -1"]),
        ({"worker": {True: "a:1"}}, ["the key True"]),
        ({3: ["a:1"]}, ["Job name 3 must be bytes or unicode"]),
    ],
    ids=repr,
)
def test_invalid_clusters(cluster, says):
    message(errors.ClusterTypeError, lambda: ClusterSpec(cluster, source="TF_CONFIG"), "TF_CONFIG", *says)
    assert issubclass(errors.ClusterTypeError, TypeError)  # TensorFlow's


# --- addresses ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "parts"),
    [
        ("a:1", ("a", 1)),
        ("10.0.0.7:65535", ("10.0.0.7", 65535)),
        ("worker-0.job.svc.cluster.local:2222", ("worker-0.job.svc.cluster.local", 2222)),
        ("[::1]:2222", ("::1", 2222)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        (UNKNOWN_ADDRESS, ("unknown", 0)),
    ],
)
def test_addresses(address, parts):
    assert split_address(address) == parts
    assert join_address(*parts) == address


def test_brackets_are_not_doubled():
    assert join_address("[::1]", 1) == "[::1]:1"


@pytest.mark.parametrize(
    ("address", "says"),
    [
        ("a", "it has no port"),
        ("", "it has no port"),
        (":1", "it has no host"),
        ("a:", "'' is not a port"),
        ("a:http", "'http' is not a port of 0 to 65535"),
        ("a:65536", "'65536' is not a port"),
        ("a:-1", "'-1' is not a port"),
        ("a:²", "'²' is not a port"),
        ("::1:2222", "brackets"),
        ("grpc://a:1", "scheme"),
        ("a b:1", "'a b' is not a host"),
        ("a,b:1", "'a,b' is not a host"),
        ("a/b:1", "'a/b' is not a host"),
    ],
)
def test_invalid_addresses(address, says):
    spec = ClusterSpec({"worker": ["x:1", address]}, source="TF_CONFIG")
    text = message(
        errors.AddressError,
        lambda: Membership(spec, Task("worker", 0)),
        says,
        "worker 1 of TF_CONFIG",
        "Write host:port",
    )
    assert repr(address) in text


# --- words --------------------------------------------------------------------------------------------


def test_tasks():
    task = Task("worker", 1)
    assert task.name == "/job:worker/task:1"
    assert f"{task}" == "worker 1"
    assert task == Task("worker", 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        task.index = 2


@given(
    st.dictionaries(
        st.sampled_from(["worker", "ps", "x"]), st.dictionaries(st.integers(0, 9), st.just("a:1"), max_size=4)
    )
)
def test_as_dict_is_the_same_spec(cluster):
    spec = ClusterSpec(cluster)
    assert ClusterSpec(spec.as_dict()) == spec == cluster
    assert eval(repr(spec)) == spec
    for job, tasks in cluster.items():
        assert spec.num_tasks(job) == len(tasks)
        assert {i: a for i, a in enumerate(spec.job_tasks(job)) if a is not None} == tasks


def test_a_cluster_def_has_jobs_and_tasks_in_order():
    spec = ClusterSpec({"worker": {2: "b:2", 0: "a:1"}, "ps": ["c:3"]})
    definition = spec.as_cluster_def()
    assert definition == ClusterDef((JobDef("ps", {0: "c:3"}), JobDef("worker", {0: "a:1", 2: "b:2"})))
    assert [(job.name, list(job.tasks.items())) for job in definition.job][1] == (
        "worker",
        [(0, "a:1"), (2, "b:2")],
    )
    assert ClusterSpec(definition) == spec
    assert ClusterSpec({}).as_cluster_def().job == ()

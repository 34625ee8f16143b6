"""The leader and the counts follow TensorFlow's rules; impossible clusters raise errors."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

import replicax as rx
from checks import message
from replicax import errors
from replicax.cluster_resolver import ClusterSpec, Membership, Task

FULL = {
    "chief": ["127.0.0.1:1234"],
    "worker": ["127.0.0.1:8964", "127.0.0.1:2333"],
    "ps": ["127.0.0.1:1926", "127.0.0.1:3141"],
}
WORKERS = {"worker": ["127.0.0.1:8964", "127.0.0.1:2333"]}


def member(cluster, task_type, task_id, source=""):
    return Membership(ClusterSpec(cluster, source=source), Task(task_type, task_id))


# --- TensorFlow's multi_worker_util_test --------------------------------------------------------------


def test_is_chief_with_a_chief():
    assert member(FULL, "chief", 0).is_chief
    assert not member(FULL, "worker", 0).is_chief
    assert not member(FULL, "ps", 0).is_chief


def test_is_chief_without_a_chief():
    assert member(WORKERS, "worker", 0).is_chief
    assert not member(WORKERS, "worker", 1).is_chief
    message(
        errors.TaskError,
        lambda: member(WORKERS, "chief", 0),
        "`task_type` 'chief' not found in cluster_spec.",
        "worker",
    )
    message(
        errors.TaskError,
        lambda: member(WORKERS, "worker", 2),
        "The `task_id` 2 exceeds the maximum id of worker.",
    )


def test_is_chief_on_the_evaluator():
    me = member({**FULL, "evaluator": ["127.0.0.1:2019"]}, "evaluator", 0)
    assert me.is_chief
    assert me.is_evaluator
    assert (me.num_workers, me.id_in_cluster, me.workers) == (1, 0, (Task("evaluator", 0),))
    assert me.address == me.leader_address == "127.0.0.1:2019"
    assert me.collective_leader == ""


def test_the_evaluator_need_not_be_in_the_spec():
    me = member(FULL, "evaluator", 0)
    assert (me.is_chief, me.num_workers, me.addresses) == (True, 1, (rx.cluster_resolver.UNKNOWN_ADDRESS,))
    message(errors.TaskError, lambda: member(FULL, "evaluator", 1), "exceeds the maximum id of evaluator.")


def test_num_workers():
    cluster = {"chief": ["a:1"], "worker": ["b:1", "c:1"], "ps": ["d:1"], "evaluator": ["e:1"]}
    for task in (("chief", 0), ("worker", 0), ("worker", 1)):
        assert member(cluster, *task).num_workers == 3
    assert member(cluster, "evaluator", 0).num_workers == 1
    message(errors.TaskError, lambda: member(cluster, "ps", 0).num_workers, "Unexpected `task_type` 'ps'")


def test_id_in_cluster():
    assert member(FULL, "chief", 0).id_in_cluster == 0
    assert member(FULL, "worker", 0).id_in_cluster == 1
    assert member(FULL, "worker", 1).id_in_cluster == 2
    assert member(WORKERS, "worker", 1).id_in_cluster == 1
    message(
        errors.TaskError, lambda: member(FULL, "ps", 0).id_in_cluster, "There is no id for task_type 'ps'"
    )


def test_addresses_are_in_the_order_of_the_ids():
    me = member(FULL, "worker", 1)
    assert me.addresses == ("127.0.0.1:1234", "127.0.0.1:8964", "127.0.0.1:2333")
    assert me.address == "127.0.0.1:2333"
    assert me.leader_address == "127.0.0.1:1234"
    assert [str(task) for task in me.workers] == ["chief 0", "worker 0", "worker 1"]


def test_leaders():
    assert member(FULL, "worker", 0).collective_leader == "/job:chief/replica:0/task:0"
    assert member(FULL, "worker", 0).coordination_leader == "/job:ps/replica:0/task:0"
    assert member(WORKERS, "worker", 1).collective_leader == "/job:worker/replica:0/task:0"
    assert member(WORKERS, "worker", 1).coordination_leader == "/job:worker/replica:0/task:0"
    chief = {**WORKERS, "chief": ["c:1"]}
    assert member(chief, "worker", 1).coordination_leader == "/job:chief/replica:0/task:0"
    message(
        errors.TaskError,
        lambda: member({"ps": ["a:1"]}, "ps", 0).collective_leader,
        "neither a chief nor workers",
        "ps",
    )


def test_an_empty_spec_is_one_worker():
    for me in (Membership.of(ClusterSpec({}), None, None), member({}, "worker", 0), member({}, "chief", 0)):
        assert me.is_chief
        assert (me.num_workers, me.id_in_cluster) == (1, 0)
        assert (me.collective_leader, me.coordination_leader) == ("", "")
    message(
        errors.TaskError, lambda: member({}, "worker", 1), "The `task_id` 1 exceeds the maximum id of worker."
    )
    message(errors.TaskError, lambda: member({}, "ps", 0), "`task_type` 'ps' not found in cluster_spec.")


# --- clusters that cannot be (case 80) ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("cluster", "task", "says"),
    [
        (
            {"worker": ["a:1"], "master": ["b:1"]},
            ("worker", 0),
            [
                "Disallowed task type found in cluster spec. Allowed types are "
                "('chief', 'worker', 'evaluator', 'ps', None) and the cluster spec is "
                "ClusterSpec({'master': ['b:1'], 'worker': ['a:1']}).",
                "leave out master",
            ],
        ),
        (
            WORKERS,
            ("master", 0),
            [
                "Unrecognized task_type: master, valid task types are: ('chief', 'worker', 'evaluator', 'ps', None)",
                '"task": {"type": "worker", "index": 0}',
            ],
        ),
        (WORKERS, ("ps", 0), ["`task_type` 'ps' not found in cluster_spec.", "ps 0", "has worker"]),
        (
            {"chief": ["a:1", "b:1"]},
            ("chief", 0),
            ["There must be at most one 'chief' job.", "Got 2", '"chief": ["a:1", "b:1"]', "workers"],
        ),
        (
            {"worker": ["a:1"], "evaluator": ["b:1", "c:1"]},
            ("worker", 0),
            ["There must be at most one 'evaluator' job.", '"evaluator": ["b:1", "c:1"]'],
        ),
        (
            WORKERS,
            ("worker", 2),
            [
                "The `task_id` 2 exceeds the maximum id of worker.",
                '"worker": ["127.0.0.1:8964", "127.0.0.1:2333"] has 2 task(s)',
                "at most 1",
            ],
        ),
        (WORKERS, ("worker", -1), ["The `task_id` -1 of worker", "negative"]),
        ({"worker": {0: "a:1", 2: "c:1"}}, ("worker", 0), ["0, 2", "gaps", '{"0": "a:1", "2": "c:1"}']),
        ({"worker": []}, ("worker", 0), ["`task_type` 'worker' not found in cluster_spec."]),
    ],
    ids=repr,
)
def test_impossible_clusters(cluster, task, says):
    message(errors.TaskError, lambda: member(cluster, *task, source="TF_CONFIG"), "TF_CONFIG", *says)
    assert issubclass(errors.TaskError, ValueError)  # TensorFlow's


@pytest.mark.parametrize("task", [(None, None), ("worker", None), (None, 0)])
def test_a_cluster_without_a_task(task):
    text = message(
        errors.TaskError,
        lambda: Membership.of(ClusterSpec(WORKERS, source="TF_CONFIG"), *task),
        "When `cluster_spec` is given, you must also specify `task_type` and `task_id`.",
        repr(task[0]),
        repr(task[1]),
        '"task": {"type": "worker", "index": 0}',
    )
    assert "from TF_CONFIG" in text
    message(
        errors.TaskError,
        lambda: Membership.of(ClusterSpec(WORKERS), *task),
        "for example task_type='worker', task_id=0",
    )


# --- addresses ----------------------------------------------------------------------------------------


def test_repeated_address():
    cluster = {"chief": ["A:2222"], "worker": ["b:2222", "a:2222"], "ps": ["a:2223"]}
    message(
        errors.AddressError,
        lambda: member(cluster, "worker", 0, "TF_CONFIG"),
        "'a:2222' occurs 2 times",
        "TF_CONFIG",
        "chief 0 and worker 1",
        "another port",
    )


def test_port_0_is_allowed_for_tasks_that_do_not_listen():
    unknown = rx.cluster_resolver.UNKNOWN_ADDRESS
    me = member({"worker": ["a:1", unknown, unknown]}, "worker", 2)
    assert me.addresses == ("a:1", unknown, unknown)
    message(
        errors.AddressError,
        lambda: member({"worker": [unknown, "a:1"]}, "worker", 1),
        "worker 0",
        "'unknown:0'",
        "Port 0",
        "give it a port",
    )
    assert member({"worker": [unknown]}, "worker", 0).address == unknown


# --- of any cluster -----------------------------------------------------------------------------------


@st.composite
def clusters(draw):
    """Valid clusters, with at least one task that computes."""
    num_chiefs, num_evaluators = draw(st.integers(0, 1)), draw(st.integers(0, 1))
    counts = {
        "worker": draw(st.integers(0 if num_chiefs else 1, 6)),
        "ps": draw(st.integers(0, 3)),
        "chief": num_chiefs,
        "evaluator": num_evaluators,
    }
    jobs = draw(st.permutations([job for job, count in counts.items() if count]))
    return {job: [f"{job}{index}:2222" for index in range(counts[job])] for job in jobs}


@given(clusters())
def test_ids_are_numbered_through(cluster):
    spec = ClusterSpec(json.loads(json.dumps(cluster)))
    tasks = [Task(job, index) for job in ("chief", "worker") for index in range(len(cluster.get(job, ())))]
    members = [Membership(spec, task) for task in tasks]
    assert [me.id_in_cluster for me in members] == list(range(len(tasks)))
    assert sum(me.is_chief for me in members) == 1
    for me in members:
        assert me.num_workers == len(tasks)
        assert me.workers == tuple(tasks)
        assert me.workers[me.id_in_cluster] == me.task
        assert me.addresses[me.id_in_cluster] == me.address == f"{me.task.type}{me.task.index}:2222"
        assert me.is_chief == (me.id_in_cluster == 0)
        assert me.collective_leader == f"/job:{tasks[0].type}/replica:0/task:0"
        assert me.leader_address == members[0].address

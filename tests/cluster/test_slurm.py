"""Slurm: TensorFlow's slurm_cluster_resolver_test, node lists of every form, and where ranks are placed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from checks import examples, message
from replicax import errors
from replicax._src.cluster.resolver import membership_of
from replicax._src.cluster.slurm import expand_hostlist, expand_tasks_per_node
from replicax.cluster_resolver import SlurmClusterResolver

NODES = "t02n13,t02n41,t02n43"
THREE = {
    "SLURM_PROCID": "0",
    "SLURM_STEP_NUM_TASKS": "3",
    "SLURM_STEP_NODELIST": NODES,
    "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}
FIVE = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": NODES,
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),1",
}
# srun -n 1 env, on a cluster of one node, shortened.
RECORDED = {
    "SLURM_JOB_ID": "134",
    "SLURM_NTASKS": "1",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "c5n-st-c5n18xlarge-1",
    "SLURM_STEP_NODELIST": "c5n-st-c5n18xlarge-1",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "c5n-st-c5n18xlarge-1",
}


def resolver(environ, **kwargs):
    """A resolver with its own environment, which it may change."""
    return SlurmClusterResolver(**kwargs, environ=dict(environ))


# --- node lists ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("hostlist", "hosts"),
    [
        ("n1", "n1"),
        ("n[1,3]", "n1 n3"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[1-2],m5,o[3-4,6,7-9]", "n1 n2 m5 o3 o4 o6 o7 o8 o9"),
        ("n[0001-0003],m5,o[009-011]", "n0001 n0002 n0003 m5 o009 o010 o011"),
        ("host[01-03,07]", "host01 host02 host03 host07"),
        ("n[9-11]", "n9 n10 n11"),
        ("a,b", "a b"),
        ("node-[1-2].ib", "node-1.ib node-2.ib"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("c5n-st-c5n18xlarge-[1-2]", "c5n-st-c5n18xlarge-1 c5n-st-c5n18xlarge-2"),
    ],
)
def test_hostlists(hostlist, hosts):
    assert expand_hostlist(hostlist) == hosts.split()


@pytest.mark.parametrize(
    ("hostlist", "says"),
    [
        ("", "is empty"),
        ("n1,", "is empty"),
        ("n1,,n2", "is empty"),
        ("n[1-", "'n[1-' is not a host"),
        ("n1]", "'n1]' is not a host"),
        ("n[[1]]", "not a host or range"),
        ("n[3-1]", "'3-1' goes backwards"),
        ("n[1-2-3]", "'1-2-3' is neither a number nor a range"),
        ("n[]", "'' is neither a number nor a range"),
        ("n[a-c]", "'a-c' is neither"),
        ("n 1", "'n 1' is not a host"),
    ],
)
def test_malformed_hostlists(hostlist, says):
    message(
        errors.ClusterEnvironmentError,
        lambda: expand_hostlist(hostlist),
        f'Invalid hostlist format "{hostlist}"',
        says,
        "SLURM_STEP_NODELIST",
    )


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("2", [2]),
        ("2,1,3", [2, 1, 3]),
        ("3(x2),2,1", [3, 3, 2, 1]),
        ("3(x2),2,11(x4)", [3, 3, 2, 11, 11, 11, 11]),
        ("13(x10)", [13] * 10),
    ],
)
def test_tasks_per_node(text, counts):
    assert expand_tasks_per_node(text) == counts


@pytest.mark.parametrize("text", ["", "2,", "x2", "2(x)", "2(3)", "2(x3", "-1", "2 1"])
def test_malformed_tasks_per_node(text):
    message(
        errors.ClusterEnvironmentError,
        lambda: expand_tasks_per_node(text),
        f'Invalid tasks-per-node list format "{text}"',
        "2(x3)",
        "SLURM_STEP_TASKS_PER_NODE",
    )


@st.composite
def parts_of_hostlists(draw):
    """A part as Slurm writes it, and its hosts."""
    prefix = draw(st.from_regex(r"[a-z][a-z0-9-]{0,4}[a-z-]", fullmatch=True))
    suffix = draw(st.sampled_from(["", "-ib", ".x"]))
    width = draw(st.integers(1, 4))
    ranges = draw(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 4)), min_size=1, max_size=3))
    texts, hosts = [], []
    for first, more in ranges:
        numbers = [str(number).zfill(width) for number in range(first, first + more + 1)]
        hosts += [prefix + number + suffix for number in numbers]
        texts.append(numbers[0] if not more else f"{numbers[0]}-{numbers[-1]}")
    return f"{prefix}[{','.join(texts)}]{suffix}", hosts


@examples(100, short=40)
@given(st.lists(parts_of_hostlists(), min_size=1, max_size=4))
def test_hostlists_expand_to_the_compressed_hosts(parts):
    assert expand_hostlist(",".join(text for text, _ in parts)) == [
        host for _, hosts in parts for host in hosts
    ]


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(1, 5)), min_size=1, max_size=5))
def test_tasks_per_node_expand_to_the_compressed_counts(runs):
    text = ",".join(f"{count}(x{times})" if times > 1 else f"{count}" for count, times in runs)
    assert expand_tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


# --- TensorFlow's -------------------------------------------------------------------------------------


def test_from_the_environment():
    environ = {**THREE, "CUDA_VISIBLE_DEVICES": "0"}
    found = SlurmClusterResolver(environ=environ)
    assert found.cluster_spec() == {"worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888"]}
    assert found.master("worker", 0, rpc_layer="grpc") == "grpc://t02n13:8888"
    assert found.num_accelerators() == {"GPU": 1}
    assert environ["CUDA_VISIBLE_DEVICES"] == "0"


@pytest.mark.parametrize("tasks_per_node", [1, None, dict.fromkeys(NODES.split(","), 1)], ids=repr)
def test_with_jobs(tasks_per_node):
    found = resolver(
        THREE,
        jobs={"ps": 1, "worker": 2},
        tasks_per_node=tasks_per_node,
        gpus_per_node=1,
        gpus_per_task=1,
        auto_set_gpu=False,
    )
    assert found.cluster_spec() == {"ps": ["t02n13:8888"], "worker": ["t02n41:8888", "t02n43:8888"]}
    assert found.get_task_info() == ("ps", 0)
    found.task_type, found.task_id = "worker", 1
    assert found.master() == "grpc://t02n43:8888"
    found.rpc_layer = "ab"
    assert found.master("ps", 0) == "ab://t02n13:8888"
    assert found.master("ps", 0, rpc_layer="test") == "test://t02n13:8888"


@pytest.mark.parametrize(("gpus", "per_task", "visible"), [(2, 1, "1"), (4, 2, "2,3")])
def test_several_tasks_on_a_node(gpus, per_task, visible):
    environ = {**FIVE, "CUDA_VISIBLE_DEVICES": ""}
    found = SlurmClusterResolver(
        jobs={"ps": 1, "worker": 4}, gpus_per_node=gpus, gpus_per_task=per_task, environ=environ
    )
    assert found.cluster_spec() == {
        "ps": ["t02n13:8888"],
        "worker": ["t02n13:8889", "t02n41:8888", "t02n41:8889", "t02n43:8888"],
    }
    assert environ["CUDA_VISIBLE_DEVICES"] == visible
    assert found.num_accelerators() == {"GPU": per_task}


@pytest.mark.parametrize("jobs", [{"ps": 2, "worker": 3}, {"worker": 3, "ps": 2}], ids=repr)
def test_each_rank_is_the_task_at_its_address_however_the_jobs_are_written(jobs):
    hosts = [f"{host}:{port}" for host, port in [("t02n13", 8888), ("t02n13", 8889), ("t02n41", 8888)]]
    for rank, address in enumerate(hosts):
        found = resolver({**FIVE, "SLURM_PROCID": str(rank)}, jobs=jobs)
        assert found.cluster_spec().task_address(*found.get_task_info()) == address


# --- where TensorFlow fails, or goes wrong ------------------------------------------------------------


def test_the_task_is_known_from_the_start():
    assert resolver(FIVE).get_task_info() == ("worker", 1)
    me = membership_of(resolver({**FIVE, "SLURM_PROCID": "4"}))
    assert (me.id_in_cluster, me.address, me.num_workers) == (4, "t02n43:8888", 5)


def test_recorded():
    found = resolver(RECORDED)
    assert found.cluster_spec() == {"worker": ["c5n-st-c5n18xlarge-1:8888"]}
    assert found.num_accelerators() == {"GPU": 0}


def test_ranks_follow_the_node_list_and_not_the_alphabet():
    environ = {**THREE, "SLURM_STEP_NODELIST": "n[9-11]", "SLURM_PROCID": "1", "SLURMD_NODENAME": "n10"}
    assert resolver(environ).cluster_spec() == {"worker": ["n9:8888", "n10:8888", "n11:8888"]}
    assert resolver(environ, tasks_per_node={"n11": 1, "n10": 1, "n9": 1}).master() == "grpc://n10:8888"


@pytest.mark.parametrize("distribution", ["cyclic", "cyclic:block", "Cyclic,Pack"])
def test_cyclic_distribution(distribution):
    environ = {**FIVE, "SLURM_DISTRIBUTION": distribution, "SLURMD_NODENAME": "t02n41"}
    assert resolver(environ).cluster_spec() == {
        "worker": ["t02n13:8888", "t02n41:8888", "t02n43:8888", "t02n13:8889", "t02n41:8889"]
    }


@pytest.mark.parametrize("distribution", ["block", "block:cyclic", "*", ""])
def test_block_distribution(distribution):
    assert resolver({**FIVE, "SLURM_DISTRIBUTION": distribution}).master() == "grpc://t02n13:8889"


def test_a_distribution_that_is_not_known():
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver({**FIVE, "SLURM_DISTRIBUTION": "plane"}),
        "SLURM_DISTRIBUTION='plane'",
        "--distribution=block",
    )


def test_rank_on_another_node():
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver({**FIVE, "SLURMD_NODENAME": "t02n43"}),
        "SLURM_PROCID=1 should be on node 't02n13'",
        "SLURMD_NODENAME='t02n43'",
        "tasks_per_node",
    )


# --- GPUs ---------------------------------------------------------------------------------------------


def test_gpus_are_taken_from_those_that_are_visible():
    environ = {**FIVE, "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
    found = SlurmClusterResolver(environ=environ)
    for _ in range(2):  # asking twice changes nothing
        found.cluster_spec()
        assert environ["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert found.num_accelerators() == {"GPU": 2}


def test_tasks_of_each_node_share_its_gpus_from_the_first_on():
    visible = []
    for rank in range(5):
        environ = {**FIVE, "SLURM_PROCID": str(rank), "CUDA_VISIBLE_DEVICES": "4,5,6,7"}
        SlurmClusterResolver(environ=environ).cluster_spec()
        visible.append(environ["CUDA_VISIBLE_DEVICES"])
    assert visible == ["4,5", "6,7", "4,5", "6,7", "4,5"]


def test_gpus_are_not_changed():
    for extra, kwargs in (
        ({}, {}),  # none are known
        ({"SLURM_GPUS_PER_TASK": "1", "CUDA_VISIBLE_DEVICES": "0"}, {}),  # Slurm has shared them out
        ({"CUDA_VISIBLE_DEVICES": "0,1"}, {"auto_set_gpu": False}),
        ({"CUDA_VISIBLE_DEVICES": "0"}, {}),  # fewer than tasks
    ):
        environ = {**FIVE, **extra}
        SlurmClusterResolver(**kwargs, environ=environ).cluster_spec()
        assert environ == {**FIVE, **extra}
    assert resolver({**FIVE, "SLURM_GPUS_ON_NODE": "4"}).num_accelerators() == {"GPU": 2}


def test_too_many_gpus():
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(FIVE, gpus_per_node=1, gpus_per_task=1),
        "Requested more GPUs per node than available.",
        "A node has 1, and 2 task(s) with 1 each",
    )


# --- partial and malformed ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREE)
def test_a_variable_is_missing(name):
    environ = {key: value for key, value in THREE.items() if key != name}
    text = message(
        errors.ClusterEnvironmentError, lambda: resolver(environ), f"{name} not found in environment.", "srun"
    )
    assert "TF_CONFIG" in text
    assert issubclass(errors.ClusterEnvironmentError, RuntimeError)  # TensorFlow's


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"SLURM_PROCID": "one"}, ["SLURM_PROCID='one'", "whole number"]),
        ({"SLURM_PROCID": "-1"}, ["SLURM_PROCID='-1'"]),
        ({"SLURM_PROCID": "3"}, ["SLURM_PROCID=3 must be less than the number of tasks, 3"]),
        ({"SLURM_STEP_NUM_TASKS": "0"}, ["SLURM_STEP_NUM_TASKS='0'", "at least 1"]),
        ({"SLURM_STEP_NUM_TASKS": "4"}, ["Requested 4 tasks but only 3 were assigned."]),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x2)"}, ["has 3 node(s)", "'1(x2)' has 2"]),
        ({"SLURM_STEP_NODELIST": "n[1-"}, ['Invalid hostlist format "n[1-"']),
        ({"SLURM_STEP_TASKS_PER_NODE": "one"}, ['Invalid tasks-per-node list format "one"']),
    ],
    ids=repr,
)
def test_malformed(changed, says):
    message(errors.ClusterEnvironmentError, lambda: resolver({**THREE, **changed}), *says)


def test_jobs_that_do_not_fit():
    message(
        errors.ClusterEnvironmentError,
        lambda: resolver(THREE, jobs={"worker": 2}),
        "Requested 2 tasks but only 3 were assigned.",
        "--ntasks",
    )


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5).filter(sum), st.booleans(), st.data())
def test_every_rank_has_its_own_address(counts, is_cyclic, data):
    environ = {
        "SLURM_STEP_NUM_TASKS": str(sum(counts)),
        "SLURM_STEP_NODELIST": f"n[1-{len(counts)}]",
        "SLURM_STEP_TASKS_PER_NODE": ",".join(map(str, counts)),
        "SLURM_DISTRIBUTION": "cyclic" if is_cyclic else "block",
    }
    rank = data.draw(st.integers(0, sum(counts) - 1))
    me = membership_of(resolver({**environ, "SLURM_PROCID": str(rank)}))
    assert (me.id_in_cluster, me.num_workers) == (rank, sum(counts))
    hosts = [address.partition(":")[0] for address in me.addresses]
    assert [hosts.count(f"n{number}") for number in range(1, len(counts) + 1)] == counts

"""Workers that wait for a living one, networks that fail and recover, wrong clocks: in real processes."""

import contextlib
import os
import re
import time

import pytest

from faulty_network import FaultyNetwork

pytestmark = pytest.mark.timeout(250)
LIMIT_S = 150
SOON_S = 100  # nobody else would say it before many minutes, if at all


def steps(fault, num_steps):
    """Steps with collectives, 20 a second, and a new program at the end. The fault happens at the 20th step."""
    import logging
    import sys
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    limit_s = {"stays away for a while": 60, "stays away for too long": 6}.get(fault)
    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(timeout_seconds=limit_s)
    )
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        total = rx.Variable(jnp.zeros(()))
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

    def train_step(x):
        total.assign_add(rx.get_replica_context().all_reduce("SUM", x))

    def new_program(x):
        return rx.get_replica_context().all_reduce("SUM", x * 3)

    def loading_a_table(seconds):
        time.sleep(seconds)

    at = time.monotonic()
    try:
        for number in range(int(num_steps)):
            if number == 20:
                report(at_20=time.time())
                if index == 1 and fault in ("stays away for a while", "stays away for too long"):
                    loading_a_table(4 if fault.endswith("while") else 11)
            at = time.monotonic()
            strategy.run(train_step, args=(ones,))
            time.sleep(0.05)
        at = time.monotonic()
        last = strategy.run(new_program, args=(ones,))
    except rx.errors.ClusterFailureError as error:
        tasks, after_s = list(getattr(error, "tasks", ())), time.monotonic() - at
        report(kind=type(error).__name__, text=str(error), tasks=tasks, after_s=after_s)
        sys.exit(3)
    report(total=float(total), last=float(strategy.experimental_local_results(last)[0]))


def assert_trained(cluster, num_steps):
    results = cluster.wait()
    results.raise_if_failed()
    for result in results.values():
        assert (result.report["total"], result.report["last"]) == (2.0 * num_steps, 6.0)


# --- who waits, and for whom ----------------------------------------------------------------------------


@pytest.mark.rest
def test_wait_for_a_living_worker_is_logged_and_continues(local_cluster):
    """Two seconds are a stall here; a minute would be a failure."""
    cluster = local_cluster(2, environment={"REPLICAX_STALL_WARNING_S": "2"}, timeout_s=LIMIT_S)
    cluster.start(steps, ["stays away for a while", "60"])
    assert_trained(cluster, 60)
    waiting, away = (cluster.tasks["worker", n].output for n in (0, 1))
    said = [line for line in waiting if "has waited" in line and "in its program number 21" in line]
    assert 1 <= len(said) <= 4, waiting  # each time it has waited twice as long
    assert re.search(r"worker 0 has waited \d s in its program number 21", said[0])
    assert "for worker 1, which has not reached it" in said[0]
    assert "program.py" in said[0]
    assert "in loading_a_table" in said[0]
    assert "It fails after 60 s" in said[0]
    assert not any("has waited" in line and "program number 21" in line for line in away)


@pytest.mark.rest
def test_step_ends_after_its_timeout(local_cluster):
    """Its heartbeats continue. It gets the error when it reaches the step."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(steps, ["stays away for too long", "60"])
    results = cluster.wait()
    for number in (0, 1):
        result = results["worker", number]
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "PeerFailureError"
        assert result.report["tasks"] == ["worker 1"]
        assert re.search(r"worker 0 has waited \d+ s in its program number 21", result.report["text"])
        assert "in loading_a_table" in result.report["text"]
        assert "CommunicationOptions(timeout_seconds=...)" in result.report["text"]
    assert results["worker", 0].report["after_s"] < 6 + SOON_S


# --- the network ----------------------------------------------------------------------------------------


@pytest.fixture
def faulty_network():
    """Puts a cluster that has not started on a network with controlled faults."""
    with contextlib.ExitStack() as stack:
        yield lambda cluster: stack.enter_context(FaultyNetwork(cluster))


def parted(local_cluster, faulty_network, how, silence_s):
    """A cluster in which worker 1 is cut off from the others, on the control channel, in the middle of its steps.

    Returns:
      The cluster, and its network.
    """
    environment = {"REPLICAX_SILENCE_TIMEOUT_S": str(silence_s)}
    cluster = local_cluster(2, environment=environment, timeout_s=LIMIT_S)
    network = faulty_network(cluster)
    cluster.start(steps, ["none", "140"])
    for task in cluster.tasks.values():
        task.wait_for_report("at_20", LIMIT_S)
    network.partition("worker", 1, how=how)
    return cluster, network


@pytest.mark.rest
@pytest.mark.parametrize(
    ("how", "of_controller", "of_worker_1"),
    ids=["cut", "blackhole"],
    argvalues=[
        ("cut", "worker 0 at 127.0.0.1:\\d+, ended the connection", "worker 1 died without a word"),
        pytest.param(
            "blackhole",
            "worker 0 at 127.0.0.1:\\d+, has not been heard of for \\d+ s",
            r"worker 1 has been silent for \d+ s",
            marks=pytest.mark.long,
        ),
    ],
)
def test_partitioned_worker_and_the_others_name_each_other(
    local_cluster, faulty_network, how, of_controller, of_worker_1
):
    """Their collectives continue meanwhile, because those use another connection."""
    cluster, _ = parted(local_cluster, faulty_network, how, silence_s=4 if how == "blackhole" else 20)
    results = cluster.wait()
    for number, said in ((0, of_worker_1), (1, of_controller)):
        result = results["worker", number]
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "PeerFailureError"
        assert result.report["tasks"] == [f"worker {1 - number}"]
        assert re.search(said, result.report["text"]), result.report["text"]


@pytest.mark.rest
def test_a_partition_that_heals_in_time_is_no_failure(local_cluster, faulty_network):
    """A cable is pulled and put back."""
    cluster, network = parted(local_cluster, faulty_network, "blackhole", silence_s=20)
    time.sleep(4)
    network.heal()
    assert_trained(cluster, 140)


@pytest.mark.parametrize("delay_s", [0.3, pytest.param(1.0, marks=pytest.mark.long)])
@pytest.mark.rest
def test_a_slow_network_is_no_failure(local_cluster, faulty_network, delay_s):
    """From the start on: agreements take as long, but steps do not."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    faulty_network(cluster).delay("worker", 1, delay_s)
    cluster.start(steps, ["none", "40"])
    assert_trained(cluster, 40)


# --- clocks ---------------------------------------------------------------------------------------------

# Python imports it at its start, in every task and in the service beside worker 0.
WRONG_CLOCK = """
import json, os, time
task = json.loads(os.environ.get("TF_CONFIG", '{"task": {}}'))["task"]
skew_s = %r if task.get("index") == %r else 0
seconds, nanoseconds = time.time, time.time_ns
time.time = lambda: seconds() + skew_s
time.time_ns = lambda: nanoseconds() + skew_s * 10**9
"""


@pytest.mark.parametrize(
    ("worker", "hours"),
    [(0, 5), *(pytest.param(1, hours, marks=pytest.mark.long) for hours in (5, -5))],
    ids=str,
)
@pytest.mark.rest
def test_a_clock_that_is_hours_off_changes_nothing(local_cluster, tmp_path, worker, hours):
    (tmp_path / "sitecustomize.py").write_text(WRONG_CLOCK % (hours * 3600, worker))
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    environment = {
        "PYTHONPATH": path,
        "REPLICAX_SILENCE_TIMEOUT_S": "60",
        "REPLICAX_STALL_WARNING_S": "30",
        "REPLICAX_START_TIMEOUT_S": "60",
    }
    cluster = local_cluster(2, environment=environment, timeout_s=LIMIT_S)
    cluster.start(steps, ["none", "60"])
    assert_trained(cluster, 60)
    times = [cluster.tasks["worker", n].wait_for_report("at_20", 1) for n in (0, 1)]
    assert abs(times[worker] - times[1 - worker] - hours * 3600) < 60  # it was off
    for task in cluster.tasks.values():
        assert not any("has waited" in line for line in task.output)

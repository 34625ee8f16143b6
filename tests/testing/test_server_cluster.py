"""Clusters with parameter servers for tests: ``server_cluster``, and ``LocalCluster`` with a program for the chief."""

import contextlib
import os
import signal
import time

import numpy as np
import pytest

from checks import catches, message
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.vocabulary.errors import UnauthenticatedError, UnavailableError
from replicax.cluster_resolver import TFConfigClusterResolver
from replicax.errors import ClusterError, InvalidArgumentError
from replicax.testing import LocalCluster, server_cluster

pytestmark = pytest.mark.timeout(250)


def ask(cluster, job, index, what="status", token=None, timeout_s=60.0):
    """The answers of a task to this process, the coordinator."""
    credentials = Credentials.from_environment(os.environ) if token is None else Credentials(token=token)
    header = {"incarnation": "a", "ps": cluster.cluster["ps"]}
    with TaskClient(cluster.cluster[job][index], credentials, f"{job} {index}") as client:
        return client.ask(what, header, timeout_s)


def make(cluster, value):
    """A variable on ps 0."""
    piece = {"key": "w", "shape": list(value.shape), "dtype": str(value.dtype), "initial": "array"}
    credentials = Credentials.from_environment(os.environ)
    with TaskClient(cluster.cluster["ps"][0], credentials, "ps 0") as client, client.open() as link:
        link.call(Message({"op": "create", "incarnation": "a", "shards": [piece]}, [value]), 60.0)


def test_the_process_of_the_test_is_the_coordinator(monkeypatch, tmp_path):
    """Also its effect on its tasks."""
    arguments = ["--snapshot-dir", tmp_path, "--snapshot-interval", "0.05"]
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setenv("REPLICAX_TOKEN", "of somebody else")
    with server_cluster(workers=2, ps=1, server_arguments=arguments) as cluster:
        resolver = TFConfigClusterResolver()
        assert (resolver.task_type, resolver.task_id) == ("chief", 0)
        assert resolver.cluster_spec() == cluster.resolver.cluster_spec() == cluster.cluster
        tasks = [("worker", 0), ("worker", 1), ("ps", 0)]
        told = {task: ask(cluster, *task, "hello") for task in tasks}
        assert [told[task]["task"] for task in tasks] == ["worker 0", "worker 1", "ps 0"]
        assert {answer["num_devices"] for answer in told.values()} == {1}
        assert [told[task]["pid"] for task in tasks] == [task.pid for task in cluster.servers]
        message(UnauthenticatedError, lambda: ask(cluster, "ps", 0, token="of somebody else"), "wrong token")

        cluster.tasks["worker", 0].stop()
        message(UnavailableError, lambda: ask(cluster, "worker", 0, timeout_s=0.5), "within 0.5 s")
        cluster.tasks["worker", 0].resume()
        assert ask(cluster, "worker", 0)["incarnation"] == "a"

        cluster.tasks["worker", 1].kill()
        assert cluster.tasks["worker", 1].wait().exit_code == 137
        message(UnavailableError, lambda: ask(cluster, "worker", 1, timeout_s=5.0), "worker 1")
        cluster.restart("worker", 1)
        cluster.wait_for_servers()
        again = ask(cluster, "worker", 1)
        assert (again["incarnation"], again["task"]) == (None, "worker 1")
        assert again["instance"] != told["worker", 1]["instance"]

        make(cluster, np.arange(6, dtype=np.float32))
        while not ask(cluster, "ps", 0, "heartbeat")["statistics"]["num_snapshots"]:
            time.sleep(0.05)
        cluster.tasks["ps", 0].kill()
        cluster.restart("ps", 0)
        cluster.wait_for_servers()
        status = ask(cluster, "ps", 0)
        assert (status["incarnation"], status["statistics"]["shards"]) == ("a", 1)
        assert status["instance"] != told["ps", 0]["instance"]

        until = time.monotonic() + 60
        while not catches(cluster.tasks["ps", 0].pid, signal.SIGTERM) and time.monotonic() < until:
            time.sleep(0.01)  # it serves before it waits to be told to end
        cluster.tasks["ps", 0].terminate()
        assert cluster.tasks["ps", 0].wait().exit_code == 0
        message(InvalidArgumentError, cluster.start_servers, "called before")
        pids = cluster.pids
    assert "TF_CONFIG" not in os.environ
    assert os.environ["REPLICAX_TOKEN"] == "of somebody else"
    assert len(pids) == 5
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.rest
def test_a_program_for_the_chief(local_cluster):
    program = """
    import os
    from replicax.testing import report
    from replicax.cluster_resolver import TFConfigClusterResolver
    from replicax._src.cluster.credentials import Credentials
    from replicax._ps.transport.transport import TaskClient

    address = TFConfigClusterResolver().cluster_spec().task_address("ps", 0)
    with TaskClient(address, Credentials.from_environment(os.environ), "ps 0") as client:
        report(task=client.ask("status", {}, 10.0)["task"])
    """
    cluster = local_cluster(0, chief=True, num_ps=1)
    cluster.start_servers()
    cluster.start(program)
    results = cluster.wait()
    results.raise_if_failed()  # the server was ended, and ended well
    assert results["chief", 0].report == {"task": "ps 0"}
    assert not cluster.tasks["ps", 0].is_running


def test_a_server_that_does_not_start_is_shown(local_cluster):
    cluster = local_cluster(0, chief=True, num_ps=1, environment={"REPLICAX_TOKEN": "\t"})
    with pytest.raises(Exception, match=r"token.*ASCII"):
        cluster.start_servers()
    assert not cluster.tasks["ps", 0].is_running


def test_clusters_without_servers():
    with LocalCluster(1) as cluster:
        message(InvalidArgumentError, cluster.start_servers, "no servers")
    message(ClusterError, lambda: LocalCluster(1, num_ps=1, script_in="everybody"), "chief, workers, all")
    with contextlib.closing(LocalCluster(1, num_ps=1)) as cluster:
        assert set(cluster.environment_of("worker", 0)) == {"TF_CONFIG", "REPLICAX_TOKEN"}

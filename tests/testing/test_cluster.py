"""``LocalCluster``: real processes with TF_CONFIG that a test kills, stops and restarts."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from checks import message
from replicax import errors
from replicax.testing import LocalCluster, report
from slowed_tasks import slowed

LIMIT_S = 100
pytestmark = pytest.mark.timeout(250)


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


# What scripts begin with. They do not import replicax, which takes a second.
TASK = """
import json, os, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]["type"] + " " + str(config["task"]["index"])
def report(**values):
    with open(os.environ["REPLICAX_REPORT_FILE"], "a") as file:
        file.write(json.dumps(values) + "\\n")
"""
COUNT = "\nfor i in range(100_000):\n    print(i)\n    time.sleep(0.005)\n"


def script(source):
    return TASK + textwrap.dedent(source)


# --- what comes back ----------------------------------------------------------------------------------


def test_results(local_cluster):
    cluster = local_cluster(2, chief=True, num_ps=1, evaluator=True, script_in="all")
    cluster.start(
        script("print(task, sys.argv[1:]); report(a=1, b=2); report(a=3); sys.exit(task == 'ps 0')"),
        ["x", "y"],
    )
    results = cluster.wait()
    assert list(results) == [("chief", 0), ("worker", 0), ("worker", 1), ("ps", 0), ("evaluator", 0)]
    for (kind, index), result in results.items():
        assert result.output == (f"{kind} {index} ['x', 'y']",)
        assert result.reports == ({"a": 1, "b": 2}, {"a": 3})
        assert result.report == {"a": 3, "b": 2}
        assert (result.exit_code, result.signal) == (int(kind == "ps"), None)
    message(errors.TaskFailedError, results.raise_if_failed, "ps 0 ended with exit code 1", "ps 0 ['x', 'y']")
    assert issubclass(errors.TaskFailedError, AssertionError)
    assert set(cluster.statistics()["tasks"]) == {"chief 0", "worker 0", "worker 1", "ps 0", "evaluator 0"}


def test_environment_of_tasks(local_cluster):
    cluster = local_cluster(2, devices_per_worker=3, environment={"MORE": "1", "HOME": None})
    cluster.own_environment["worker", 1] = {"OWN": "2", "MORE": "3"}
    assert cluster.environment_of("worker", 1).items() >= {"OWN": "2", "MORE": "3"}.items()
    cluster.start(script("report(config=config, **os.environ)"))
    told = [result.report for result in cluster.wait().values()]
    for index, environment in enumerate(told):
        assert environment["config"] == {
            "cluster": cluster.cluster,
            "task": {"type": "worker", "index": index},
        }
        assert environment["JAX_NUM_CPU_DEVICES"] == "3"
        assert environment["MORE"] == ("3" if index else "1")
        assert environment.get("OWN") == ("2" if index else None)
        assert environment["REPLICAX_RESTART_COUNT"] == "0"
        assert "HOME" not in environment


def a_program(first, second):
    import os
    import sys

    print(first, second, sys.argv[1:], "TF_CONFIG" in os.environ)


def test_a_path_and_a_function(local_cluster, tmp_path):
    path = tmp_path / "program.py"
    path.write_text("import sys; print(__file__, sys.argv[1:])")
    cluster = local_cluster(1)
    cluster.start(path, ["x"])
    assert cluster.wait()["worker", 0].output == (f"{path} ['x']",)
    cluster = local_cluster(1)
    cluster.start(a_program, ["x", "y"])
    assert cluster.wait()["worker", 0].output == ("x y ['x', 'y'] True",)


def test_report_of_arrays():
    """The real ``report``, in a process that imports replicax and JAX."""
    program = """
    import numpy as np, jax.numpy as jnp
    from replicax.testing import report
    report(loss=np.float32(0.5), weights=jnp.arange(3.0), pytree={"a": [np.int64(1)]})
    report(loss=0.25)
    """
    with LocalCluster(1) as cluster:
        cluster.start(program)
        results = cluster.wait()
    results.raise_if_failed()
    assert results["worker", 0].reports == (
        {"loss": 0.5, "weights": [0.0, 1.0, 2.0], "pytree": {"a": [1]}},
        {"loss": 0.25},
    )


def test_report_outside_a_cluster():
    message(errors.ContextError, lambda: report(a=1), "no LocalCluster has started", "REPLICAX_REPORT_FILE")


# --- what is done to tasks ----------------------------------------------------------------------------


def test_kill_stop_and_resume(local_cluster):
    cluster = local_cluster(2)
    cluster.start(script(COUNT))
    stopped, killed = cluster.tasks["worker", 0], cluster.tasks["worker", 1]
    stopped.wait_for_output("3")
    killed.kill()
    assert (killed.wait().exit_code, killed.wait().signal) == (137, signal.SIGKILL)
    stopped.stop()
    until(lambda: has_no_more_output(stopped), "the last line that it had written")
    before = len(stopped.output)
    assert stopped.is_running
    stopped.resume()
    until(lambda: len(stopped.output) > before, "going on")
    stopped.terminate()
    assert stopped.wait().signal == signal.SIGTERM


def has_no_more_output(task):
    """The test runs for a while; one that counts has 40 lines."""
    before = len(task.output)
    time.sleep(0.2)
    return len(task.output) == before


def test_a_slowed_task_runs_a_part_of_the_time(local_cluster):
    cluster = local_cluster(2)
    cluster.start(script("report(ready=True)\nwhile True: time.process_time()"))
    slow, fast = cluster.tasks["worker", 0], cluster.tasks["worker", 1]
    for task in (slow, fast):
        task.wait_for_report("ready")
    with slowed(slow, 0.1):
        states = [state_of(slow.pid) for _ in range(150) if time.sleep(0.005) is None]
        assert states.count("T") > 75
        until(lambda: state_of(slow.pid) != "T", "running at times")
    assert "T" not in [state_of(slow.pid) for _ in range(40) if time.sleep(0.005) is None]
    assert state_of(fast.pid) != "T"


def state_of(pid):
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


def test_restart(local_cluster):
    cluster = local_cluster(2)
    cluster.start(
        script("""
    print(os.environ["REPLICAX_RESTART_COUNT"], config["cluster"])
    report(pid=os.getpid())
    time.sleep(60)
    """)
    )
    task = cluster.tasks["worker", 1]
    task.wait_for_report("pid")
    cluster.restart("worker", 1)
    task.wait_for_output("1 {")
    until(lambda: len(task.reports) == 2, "the second report")
    (_, first), (_, second) = [line.split(" ", 1) for line in task.output]
    assert first == second == str(cluster.cluster)
    assert [r["pid"] for r in task.reports] == list(task.pids)
    assert task.is_running
    assert cluster.tasks["worker", 0].reports == ({"pid": cluster.tasks["worker", 0].pid},)
    task.kill()
    task.wait()
    cluster.restart("worker", 1)
    task.wait_for_output("2 {")


def test_waiting_is_bounded_and_names_running_tasks(local_cluster):
    cluster = local_cluster(2, timeout_s=0.5)
    cluster.start(script("print('I am', task)\nif task == 'worker 1': time.sleep(60)\n"))
    cluster.tasks["worker", 1].wait_for_output("I am", LIMIT_S)
    cluster.tasks["worker", 0].wait(LIMIT_S)
    text = message(
        errors.ProcessTimeoutError, cluster.wait, "worker 1 still runs after 0.5 s", "I am worker 1"
    )
    assert "worker 0" not in text
    task = cluster.tasks["worker", 1]
    message(errors.ProcessTimeoutError, task.wait, "worker 1", "still runs")
    message(
        errors.ProcessTimeoutError,
        lambda: task.wait_for_output("x y"),
        "a line with 'x y'",
        "within 0.5 s",
        "I am",
    )
    ended = cluster.tasks["worker", 0]
    began = time.monotonic()
    message(
        errors.ProcessTimeoutError,
        lambda: ended.wait_for_report("loss", 60),
        "a report of 'loss'",
        "exited with code 0",
    )
    assert time.monotonic() - began < LIMIT_S


def test_closing_leaves_nothing():
    with LocalCluster(2) as cluster:
        cluster.start(
            script("import subprocess; report(pid=subprocess.Popen(['sleep', '60']).pid); time.sleep(60)")
        )
        children = [task.wait_for_report("pid") for task in cluster.tasks.values()]
        cluster.tasks["worker", 0].stop()
        assert len(cluster.pids) == 2
    for pid in (*cluster.pids, *children):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    cluster.close()
    assert all(task.ending.signal == signal.SIGKILL for task in cluster.tasks.values())


def test_unsupported_values(local_cluster, tmp_path):
    cluster = local_cluster(2)
    refused = errors.InvalidArgumentError
    message(
        refused,
        lambda: cluster.start("no_such_script.py"),
        "there is no script 'no_such_script.py'",
        "more than one line",
    )
    message(refused, lambda: cluster.start(tmp_path), "there is no script")
    message(refused, lambda: cluster.start(len), "source of", "cannot be found")
    message(refused, lambda: cluster.start(lambda: 3), "plain function")
    message(refused, lambda: cluster.restart("worker", 0), "no worker 0", "none, before start()")
    cluster.start(script(""))
    message(refused, lambda: cluster.start(script("")), "was called before")
    message(refused, lambda: cluster.restart("ps", 0), "no ps 0", "worker 0, worker 1")
    message(refused, lambda: LocalCluster(devices_per_worker=0), "at least 1, got 0")
    message(errors.ClusterError, lambda: LocalCluster(0), "at least one worker")


# --- the fixture --------------------------------------------------------------------------------------

PROJECT = """
import sys, time
pytest_plugins = ["replicax.pytest_plugin"]

def test_that_fails(local_cluster):
    cluster = local_cluster(num_workers=2)
    cluster.start("import os, time\\nprint('said by', os.getpid())\\ntime.sleep(60)")
    for task in cluster.tasks.values():
        task.wait_for_output("said by")
    print("pids", *cluster.pids)
    assert False

def test_that_leaves_a_process(local_cluster):
    cluster = local_cluster(1)
    cluster.start("import time\\ntime.sleep(60)")
    cluster.close = lambda: None
    sys.modules["left"] = cluster

def test_afterwards():
    cluster = sys.modules["left"]
    del cluster.close
    cluster.close()
"""


@pytest.mark.rest
def test_fixture_shows_output_and_finds_leftover_processes(tmp_path):
    (tmp_path / "test_project.py").write_text(PROJECT)
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            "-p",
            "no:xdist",
            "-q",
            "--rootdir",
            tmp_path,
            tmp_path,
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTEST_ADDOPTS": ""},
    )
    assert "1 failed, 2 passed, 1 error" in run.stdout, run.stdout
    pids = [
        int(word) for line in run.stdout.splitlines() if line.startswith("pids") for word in line.split()[1:]
    ]
    assert len(pids) == 2
    for index, pid in enumerate(pids):
        assert f"Output of worker {index}, which still runs" in run.stdout
        assert f"said by {pid}" in run.stdout
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    assert "processes of the cluster are left" in run.stdout


def test_unfinished_reports_are_skipped(tmp_path):
    from replicax._testing.task_reports import read_reports

    path = tmp_path / "reports"
    assert read_reports(path) == ()
    path.write_text(json.dumps({"a": 1}) + '\n{"a": ')
    assert read_reports(path) == ({"a": 1},)

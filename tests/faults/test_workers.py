"""Workers that are missing, killed, stopped, wrong or different, in real processes: every one is named in time."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from replicax._testing.task_reports import read_reports

pytestmark = pytest.mark.timeout(250)
LIMIT_S = 120
SOON_S = 100  # nobody else would say it before many minutes, if at all


def steps(fault, victim):
    """Steps with collectives; at the 20th the victim acts differently."""
    import os
    import signal
    import sys
    import threading
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    is_victim = index == int(victim)
    with strategy.scope():
        weights = rx.Variable(jnp.ones(1000))
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

    def train_step(x):
        total = rx.get_replica_context().all_reduce("SUM", weights * x)
        weights.assign(total / jnp.sum(total))
        return jnp.sum(total)

    def evaluate(x):
        return rx.get_replica_context().all_reduce("SUM", x * 5)

    def with_number_of_worker(x):
        return rx.get_replica_context().all_reduce("SUM", x * (index + 1.0))

    def long_to_compile(x):  # about 4 s, of which tracing takes 0.1
        keys = [jax.random.key(n) for n in range(10)]
        return rx.get_replica_context().all_reduce("SUM", x * sum(jax.random.gamma(key, 2.0) for key in keys))

    def on_compilation(event, duration_s, **_):
        nonlocal at
        if event == "/jax/core/compile/jaxpr_to_mlir_module_duration" and is_victim:
            report(lowered=True)
            threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
        if event == "/jax/core/compile/backend_compile_duration":
            at = time.monotonic()
            report(compiled=True)

    def step():
        return float(strategy.reduce("SUM", strategy.run(train_step, args=(ones,)), axis=None))

    at = time.monotonic()
    try:
        for number in range(60):
            at = time.monotonic()
            if number == 20:
                report(step=number)
                if fault == "all are killed":
                    time.sleep(600)
                if fault == "different code":
                    strategy.run(with_number_of_worker, args=(ones,))
                if fault == "killed while others are idle" and not is_victim:
                    time.sleep(2)
                    at = time.monotonic()
                if is_victim and fault.startswith("killed"):
                    os.kill(os.getpid(), signal.SIGKILL)
                if is_victim and fault == "stopped":
                    os.kill(os.getpid(), signal.SIGSTOP)
                if is_victim and fault == "raises":
                    raise ValueError("a mistake of my own")
                if is_victim and fault == "leaves":
                    sys.exit(0)
                if is_victim and fault == "a program more":
                    strategy.run(evaluate, args=(ones,))
                if is_victim and fault == "a known program more":
                    strategy.run(train_step, args=(ones,))
            if fault == "compiling" and number == 20:
                jax.monitoring.register_event_duration_secs_listener(on_compilation)
                strategy.run(long_to_compile, args=(ones,))
            step()
    except rx.errors.ClusterFailureError as error:
        tasks = list(getattr(error, "tasks", ()))
        report(kind=type(error).__name__, text=str(error), tasks=tasks, after_s=time.monotonic() - at)
        sys.exit(3)
    report(done=True)


def run(local_cluster, fault, victim, workers=2, **environment):
    cluster = local_cluster(workers, environment=environment, timeout_s=LIMIT_S)
    cluster.start(steps, [fault, str(victim)])
    survivors = [n for n in range(workers) if n != victim]
    return cluster, {n: cluster.tasks["worker", n] for n in survivors}


LONG, REST = pytest.mark.long, pytest.mark.rest


@pytest.mark.parametrize(
    ("fault", "says", "victim"),
    [
        ("killed", "died without a word", 0),
        pytest.param("killed", "died without a word", 1, marks=LONG),
        pytest.param("raises", "ValueError: a mistake of my own", 0, marks=LONG),
        pytest.param("raises", "ValueError: a mistake of my own", 1, marks=LONG),
        pytest.param("leaves", "has ended its program", 0, marks=LONG),
        pytest.param("leaves", "has ended its program", 1, marks=LONG),
        pytest.param("killed while others are idle", "died without a word", 0, marks=REST),
        pytest.param("killed while others are idle", "died without a word", 1, marks=LONG),
        pytest.param("compiling", "died without a word", 0, marks=LONG),
        pytest.param("compiling", "died without a word", 1, marks=LONG),
    ],
)
def test_lost_worker_is_named_within_seconds(local_cluster, fault, says, victim):
    """This includes process 0, with which JAX's own coordination would end the others."""
    cluster, survivors = run(local_cluster, fault, victim)
    results = cluster.wait()
    for number in survivors:
        result = results["worker", number]
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "PeerFailureError"
        assert result.report["tasks"] == [f"worker {victim}"]
        assert says in result.report["text"]
        assert result.report["after_s"] < SOON_S
        assert "stack trace" not in "\n".join(result.output)
    if fault == "compiling":
        died = results["worker", victim]
        assert died.signal == signal.SIGKILL
        assert died.report["lowered"]
        assert "compiled" not in died.report


@pytest.mark.long
def test_all_survivors_of_three_are_told(local_cluster):
    cluster, survivors = run(local_cluster, "killed", 0, workers=3)
    results = cluster.wait()
    assert [results["worker", n].report["tasks"] for n in survivors] == [["worker 0"]] * 2


@pytest.mark.parametrize("victim", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.rest
def test_stopped_worker_is_named_after_the_timeout(local_cluster, victim):
    """The step that waits for it is unblocked."""
    _, survivors = run(local_cluster, "stopped", victim, REPLICAX_SILENCE_TIMEOUT_S="6")
    ((_, survivor),) = survivors.items()
    survivor.wait(LIMIT_S)
    (last,) = [r for r in survivor.wait(1).reports if "kind" in r]
    assert last["tasks"] == [f"worker {victim}"]
    assert re.search(r"has been silent for \d+ s", last["text"])
    assert last["after_s"] < SOON_S


def saving_what_there_is():
    """Steps until one fails; then two seconds of other work, and the end."""
    import atexit
    import time

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    atexit.register(lambda: report(at_exit=True))
    strategy = rx.MultiWorkerMirroredStrategy()
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

    def train_step(x):
        return rx.get_replica_context().all_reduce("SUM", x)

    try:
        for number in range(100_000):
            if number == 20:
                report(steps=number)
            strategy.run(train_step, args=(ones,))
            time.sleep(0.01)
    finally:
        time.sleep(2)
        report(saved=time.monotonic())


@pytest.mark.parametrize(
    ("stopped", "killed", "survivors"),
    [
        pytest.param(
            ["worker 0", "service"], [], [1], id="the host of worker 0 stops", marks=pytest.mark.rest
        ),
        pytest.param([], ["service"], [0, 1], id="the service is killed"),
        pytest.param([], ["worker 0", "service"], [1], id="the host of worker 0 dies", marks=LONG),
        pytest.param(["service"], [], [0, 1], id="the service stops", marks=LONG),
        pytest.param(["worker 1"], [], [0], id="the host of worker 1 stops", marks=LONG),
    ],
)
def test_survivors_handle_the_error_and_end_soon_after_their_program(
    local_cluster, stopped, killed, survivors
):
    cluster = local_cluster(2, environment={"REPLICAX_SILENCE_TIMEOUT_S": "3"}, timeout_s=LIMIT_S)
    cluster.start(saving_what_there_is)
    for task in cluster.tasks.values():
        task.wait_for_report("steps", LIMIT_S)
    pids = {f"worker {number}": cluster.tasks["worker", number].pid for number in (0, 1)}
    (pids["service"],) = services_of(pids["worker 0"])
    for names, number in ((stopped, signal.SIGSTOP), (killed, signal.SIGKILL)):
        for name in names:
            os.kill(pids[name], number)
    for number in survivors:
        task = cluster.tasks["worker", number]
        saved_at = task.wait_for_report("saved", LIMIT_S)
        result = task.wait(SOON_S)
        ended_after_s = task.ending.time - saved_at
        assert result.exit_code == 1, result.output
        assert "PeerFailureError" in "\n".join(result.output)
        assert result.report["at_exit"]
        assert ended_after_s < SOON_S


@pytest.mark.parametrize(
    ("fault", "victim"),
    [
        pytest.param("a program more", 0, marks=REST),
        pytest.param("a program more", 1, marks=LONG),
        pytest.param("a known program more", 0, marks=LONG),
        pytest.param("a known program more", 1, marks=LONG),
        pytest.param("different code", 1, marks=REST),
    ],
)
def test_different_programs_are_an_error_on_all(local_cluster, fault, victim):
    cluster, _ = run(local_cluster, fault, victim)
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ProgramMismatchError", result.report["text"]
        assert "worker 0:" in result.report["text"]
        assert "worker 1:" in result.report["text"]
        assert result.report["after_s"] < SOON_S


# --- at the start ---------------------------------------------------------------------------------------


def starting():
    """Makes the strategy, and reports the result."""
    import sys

    import replicax as rx
    from replicax.testing import report

    try:
        rx.MultiWorkerMirroredStrategy()
    except rx.errors.ReplicaxError as error:
        report(kind=type(error).__name__, text=str(error))
        sys.exit(3)
    report(started=True)


def source_of(function, before=""):
    import inspect
    import textwrap

    return f"{before}\n{textwrap.dedent(inspect.getsource(function))}\n{function.__name__}()\n"


@pytest.mark.rest
@pytest.mark.parametrize("missing", [pytest.param(0, marks=pytest.mark.long), 1])
def test_missing_member_is_named_in_time(local_cluster, missing):
    leave = f"""
    import json, os, sys
    if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == {missing}:
        sys.exit(0)
    """
    import textwrap

    cluster = local_cluster(2, environment={"REPLICAX_START_TIMEOUT_S": "4"}, timeout_s=LIMIT_S)
    cluster.start(source_of(starting, textwrap.dedent(leave)))
    result = cluster.wait()["worker", 1 - missing]
    assert result.exit_code == 3, result.output
    said = "worker 1 (has not come)" if missing else " s for worker 0, which does not answer"
    assert said in result.report["text"]


@pytest.mark.rest
def test_different_numbers_of_devices(local_cluster):
    before = """
import json, os
os.environ["JAX_NUM_CPU_DEVICES"] = str(json.loads(os.environ["TF_CONFIG"])["task"]["index"] + 1)
"""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(source_of(starting, before))
    for result in cluster.wait().values():
        assert result.report["kind"] == "ClusterStartError"
        assert "worker 0 has 1 of cpu, worker 1 has 2 of cpu" in result.report["text"]


@pytest.mark.rest
def test_a_port_in_use(local_cluster):
    cluster = local_cluster(2, environment={"REPLICAX_START_TIMEOUT_S": "4"}, timeout_s=LIMIT_S)
    host, port = cluster.cluster["worker"][0].split(":")
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        other.bind((host, int(port)))
        other.listen()
        cluster.start(starting)
        results = cluster.wait()
    first = results["worker", 0].report
    assert first["kind"] == "ClusterStartError"
    assert f"cannot listen at its own address {host}:{port}: Address already in use" in first["text"]
    assert results["worker", 1].exit_code == 3


@pytest.mark.rest
def test_jax_was_used_before(local_cluster):
    cluster = local_cluster(2, environment={"REPLICAX_START_TIMEOUT_S": "5"}, timeout_s=LIMIT_S)
    cluster.start(source_of(starting, "import jax.numpy\njax.numpy.ones(3)"))
    for result in cluster.wait().values():
        assert result.report["kind"] == "BackendStartedError"
        assert "Collective ops must be configured at program startup" in result.report["text"]


@pytest.mark.rest
def test_two_processes_with_one_index(local_cluster, tmp_path):
    """Three processes say that they belong to a cluster of two: the last one is rejected."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    is_over = tmp_path / "over"
    stay = f"\nimport os, time\nwhile not os.path.exists({str(is_over)!r}): time.sleep(0.05)"
    source = source_of(starting) + stay
    cluster.start(source)
    reports = tmp_path / "reports"
    third = subprocess.Popen(
        [sys.executable, "-c", source],
        env={**os.environ, **cluster.environment_of("worker", 1), "REPLICAX_REPORT_FILE": str(reports)},
    )
    try:
        deadline = time.monotonic() + LIMIT_S
        while not (all(task.reports for task in cluster.tasks.values()) and read_reports(reports)):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        is_over.touch()  # until then whoever came first is there
        third.wait(LIMIT_S)
    finally:
        third.kill()
        third.wait()
    seen = [*read_reports(reports), *(result.report for result in cluster.wait().values())]
    refused = [report for report in seen if "kind" in report]
    assert [report["kind"] for report in refused] == ["ClusterStartError"], seen
    assert "worker 0" in refused[0]["text"]
    assert "another process is already worker 1" in refused[0]["text"]


@pytest.mark.rest
def test_job_may_restart_on_the_same_ports(local_cluster):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(starting)
    cluster.wait().raise_if_failed()
    for number in range(2):
        cluster.restart("worker", number)
    cluster.wait().raise_if_failed()


@pytest.mark.rest
def test_nothing_is_left_after_a_kill_of_all(local_cluster):
    """The service beside worker 0 ends when all connected processes are gone."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(steps, ["all are killed", "9"])
    for number in range(2):
        cluster.tasks["worker", number].wait_for_report("step", LIMIT_S)
    services = services_of(cluster.tasks["worker", 0].pid)
    assert len(services) == 1
    for number in range(2):
        os.kill(cluster.tasks["worker", number].pid, signal.SIGKILL)
    deadline = time.monotonic() + SOON_S
    while any(map(_runs_service, services)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(_runs_service(pid) for pid in services)


def services_of(pid):
    """The processes under ``pid`` that run the service."""
    children = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found, todo = [], [pid]
    while todo:
        for child in children.get(todo.pop(), []):
            todo.append(child)
            if _runs_service(child):
                found.append(child)
    return found


def _runs_service(pid):
    try:
        return b"cluster.controller_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False

"""Complete jobs that fail: killed and restarted, interrupted, with programs or data that differ. Real processes."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from checks import path_of_programs
from replicax._src.cluster.machine_layout import free_ports

pytestmark = pytest.mark.timeout(250)
LIMIT_S = 150
SOON_S = 100  # nobody else would say it before many minutes, if at all
WITH_KERAS = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}


# --- sums on the hosts ----------------------------------------------------------------------------------


def adding_until_one_dies():
    """Worker 1 is killed while both add."""
    import os
    import signal
    import sys
    import threading
    import time

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    report(transport=strategy.topology.host_sums.transport)
    value = strategy.experimental_distribute_values_from_function(lambda context: np.ones(10**6, np.float32))
    if strategy.cluster_resolver.task_id == 1:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGKILL]).start()
    at = time.monotonic()
    try:
        while True:
            at = time.monotonic()
            strategy.reduce("SUM", value, axis=None)
    except rx.errors.PeerFailureError as error:
        report(text=str(error), tasks=list(error.tasks), after_s=time.monotonic() - at)
    try:
        strategy.reduce("SUM", value, axis=None)
    except rx.errors.PeerFailureError as error:
        report(again=str(error))
        sys.exit(3)


@pytest.mark.rest
def test_a_death_in_a_sum_on_the_hosts_is_the_error_of_the_task(local_cluster):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(adding_until_one_dies)
    results = cluster.wait()
    assert results["worker", 0].exit_code == 3, results["worker", 0].output
    report = results["worker", 0].report
    assert report["transport"] == "shared memory"
    assert report["tasks"] == ["worker 1"]
    assert report["text"].startswith("worker 1 ")
    assert report["again"].startswith("worker 1 ")
    assert report["after_s"] < SOON_S


# --- the order of programs ------------------------------------------------------------------------------


def orders(is_known, size):
    """Two alternating programs; at the 20th turn worker 1 takes the other one first."""
    import sys
    import time

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    few = strategy.experimental_distribute_values_from_function(lambda context: np.ones(4, np.float32))
    many = strategy.experimental_distribute_values_from_function(
        lambda context: np.ones(int(size), np.float32)
    )

    def train_step(x):
        return rx.get_replica_context().all_reduce("SUM", x)

    def evaluate(x):
        return rx.get_replica_context().all_reduce("SUM", x * 5)

    def turn(function, x):
        return np.asarray(strategy.experimental_local_results(strategy.run(function, args=(x,)))[0])

    first, second = (train_step, few), (evaluate, many)
    at = time.monotonic()
    try:
        if is_known == "known":
            turn(*second)
            turn(*second)
        for number in range(200):
            is_other = index == 1 and number == 20
            for function, x in (second, first) if is_other else (first, second):
                at = time.monotonic()
                turn(function, x)
            time.sleep(0.02)
    except rx.errors.ClusterFailureError as error:
        report(kind=type(error).__name__, text=str(error), number=number, after_s=time.monotonic() - at)
        sys.exit(3)
    report(done=True)


@pytest.mark.rest
@pytest.mark.parametrize(
    "size", [pytest.param("4", id="one size"), pytest.param("1000", id="two sizes", marks=pytest.mark.long)]
)
def test_another_order_of_known_programs_is_an_error_before_they_meet(local_cluster, size):
    """Two evaluations in a row have not occurred before."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(orders, ["new", size])
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ProgramMismatchError"
        assert re.search(r"worker 0: in its program number \d+, #\d .*train_step", result.report["text"])
        assert re.search(r"worker 1: about to run its program number \d+, .*evaluate", result.report["text"])
        assert (result.report["number"], result.report["after_s"] < SOON_S) == (20, True)


@pytest.mark.rest
def test_known_orders_that_differ_are_an_error_soon_after(local_cluster):
    """They have mixed up their values by then."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(orders, ["known", "4"])
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ProgramMismatchError"
        for said in (r"worker 0: in its .*train_step", r"worker 1: in its .*evaluate"):
            assert re.search(said, result.report["text"]), result.report["text"]
        assert result.report["after_s"] < SOON_S


@pytest.mark.rest
def test_other_process_says_why_if_gloo_aborts_one(local_cluster):
    """Both orders are known, and the collectives that meet have different sizes."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(orders, ["known", "1000"])
    results = cluster.wait().values()
    aborted = [result for result in results if result.signal == signal.SIGABRT]
    named = [result for result in results if result.exit_code == 3]
    assert (len(aborted) + len(named), len(named) >= 1) == (2, True), [r.output for r in results]
    assert all("collective mismatch" in "\n".join(result.output) for result in aborted)
    for result in named:
        assert result.report["kind"] == "ProgramMismatchError", result.report["text"]
        assert result.report["after_s"] < SOON_S


# --- jobs that are started again ------------------------------------------------------------------------

# The program keeps its own state. Worker VICTIM is killed in the 12th step of its first attempt, the 17th of its second...
JOB = """
import json, os, signal, sys
import numpy as np
import replicax as rx

path, victim, num_kills = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
restarts = int(os.environ["REPLICAX_RESTART_COUNT"])
strategy = rx.MultiWorkerMirroredStrategy()
index, is_chief = strategy.cluster_resolver.task_id, strategy.extended.should_checkpoint
state = {"step": 0, "total": 0.0}
if os.path.exists(path):
    with open(path) as file:
        state = json.load(file)
print("begins at step", state["step"], "after", restarts, "restarts", flush=True)
with strategy.scope():
    total = rx.Variable(state["total"])
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

def train_step(x, number):
    total.assign_add(rx.get_replica_context().all_reduce("SUM", x * number))

for step in range(state["step"], 30):
    if index == victim and restarts < num_kills and step == 12 + 5 * restarts:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(train_step, args=(ones, np.float32(step)))
    if is_chief:
        with open(path + ".new", "w") as file:
            json.dump({"step": step + 1, "total": float(total)}, file)
        os.replace(path + ".new", path)
print("ends with", float(total), flush=True)
"""
TOTAL = 2.0 * sum(range(30))


@contextlib.contextmanager
def launched(tmp_path, source, *arguments, options=(), num_workers=2):
    """``replicax launch`` with a script, and its output; all its processes are gone afterwards."""
    script = tmp_path / "script.py"
    script.write_text(source)
    left_out = ("JAX_", "PJRT_", "TF_CONFIG")
    workers = [] if num_workers is None else ["--workers", str(num_workers)]
    process = subprocess.Popen(
        [sys.executable, "-m", "replicax", "launch", *workers, *options, script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith(left_out)},
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
            "PYTHONUNBUFFERED": "1",
            "JOB_OF_TEST": str(tmp_path),
        },
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        until_gone(tmp_path)


def until_gone(tmp_path):
    """No process of that job is left, and no service of worker 0."""
    deadline = time.monotonic() + SOON_S
    while left := list(processes_of(tmp_path)):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def processes_of(tmp_path):
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if f"JOB_OF_TEST={tmp_path}\0".encode() in (entry / "environ").read_bytes():
                    yield (entry / "cmdline").read_text().replace("\0", " ")


@pytest.mark.parametrize("victim", ["0", pytest.param("1", marks=pytest.mark.long)])
def test_job_with_a_killed_worker_restarts_and_completes(tmp_path, victim):
    arguments = [tmp_path / "state", victim, "1"]
    with launched(tmp_path, JOB, *arguments, options=["--max-restarts", "2"]) as launcher:
        output = launcher.communicate(timeout=LIMIT_S)[0]
    assert launcher.returncode == 0, output
    assert f"worker {victim} was killed by SIGKILL, the first to fail" in output
    assert "Starting all tasks again: restart 1 of 2." in output
    assert "restart 2" not in output
    # The last step may have been written or not when all ended.
    begun = re.findall(r"worker (\d) \| begins at step (\d+) after (\d) restarts", output)
    assert sorted((n, count) for n, _, count in begun) == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]
    assert {int(step) for _, step, count in begun if count == "1"} <= {11, 12}
    survivor = 1 - int(victim)
    assert re.search(rf"worker {survivor} \| .*PeerFailureError: worker {victim} died without a word", output)
    assert "direct cause" not in output, "a failed collective of the survivor explains nothing"
    assert output.count(f"| ends with {TOTAL}") == 2


@pytest.mark.long
def test_job_that_fails_too_often_ends(tmp_path):
    arguments = [tmp_path / "state", "1", "9"]
    with launched(tmp_path, JOB, *arguments, options=["--max-restarts", "1"]) as launcher:
        output = launcher.communicate(timeout=LIMIT_S)[0]
    assert launcher.returncode == 137, output
    assert output.count("worker 1 was killed by SIGKILL, the first to fail. Its last lines:") == 2
    last = output.rpartition("Its last lines:\n")[2]
    assert "begins at step" in last
    assert "after 1 restarts" in last
    assert "ends with" not in output


# --- failed before they joined --------------------------------------------------------------------------

FAILS_AT_THE_START = """
import json, os, sys, time
import replicax as rx

if json.loads(os.environ["TF_CONFIG"])["task"]["index"] == int(sys.argv[1]):
    time.sleep(float(sys.argv[2]))
    raise ImportError("a package is missing here")
try:
    rx.MultiWorkerMirroredStrategy()
except rx.errors.ClusterStartError as error:
    print("hears:", str(error).replace("\\n", " "), flush=True)
    sys.exit(1)
"""


@pytest.mark.parametrize(
    ("failed", "after_s"),
    [
        ("1", "0"),  # before worker 0 listens
        pytest.param("1", "5", marks=pytest.mark.long),  # while it waits
        pytest.param("0", "0", marks=pytest.mark.long),
        pytest.param("0", "5", marks=pytest.mark.long),
    ],
)
def test_a_task_that_fails_before_it_joins_is_named_at_once(tmp_path, failed, after_s):
    """The limits are minutes."""
    with launched(tmp_path, FAILS_AT_THE_START, failed, after_s, options=["--grace", "60"]) as launcher:
        began = time.monotonic()
        output = launcher.communicate(timeout=LIMIT_S)[0]
        assert time.monotonic() - began < SOON_S
    assert launcher.returncode == 1, output
    (heard,) = re.findall(rf"worker {1 - int(failed)} \| hears: (.*)", output)
    assert f"worker {failed} ended before all had joined: it exited with code 1" in heard
    assert "ImportError: a package is missing here" in heard


@pytest.mark.long
def test_worker_that_joins_after_a_failure_hears_of_it(tmp_path):
    """Worker 1 fails before it joins; worker 0 learns of it and ends; worker 2 joins only then."""
    hosts = ",".join(f"127.0.0.1:{port}" for port in free_ports(3))

    def on_host(index):
        folder = tmp_path / str(index)
        folder.mkdir()
        options = ["--hosts", hosts, "--task-index", str(index), "--grace", "60", "--plain"]
        return launched(folder, FAILS_AT_THE_START, "1", "0", options=options, num_workers=None)

    with on_host(0) as first, on_host(1) as failing:
        for line in first.stdout:  # worker 0 has heard of it and has ended; its launcher says that it waits
            if "worker 0 exited with code 1" in line:
                break
        assert failing.wait(LIMIT_S) == 1
        began = time.monotonic()
        with on_host(2) as late:
            output = late.communicate(timeout=LIMIT_S)[0]
            assert time.monotonic() - began < SOON_S
        first.send_signal(signal.SIGTERM)
        assert first.wait(LIMIT_S) == 128 + signal.SIGTERM
    (heard,) = re.findall(r"worker 2 \| hears: (.*)", output)
    assert "worker 0 ended before all had joined" in heard
    assert "worker 1 ended before all had joined: it exited with code 1" in heard
    assert "ImportError: a package is missing here" in heard


# --- interrupted ----------------------------------------------------------------------------------------

ENDLESS = """
import os, time
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

def train_step(x):
    return rx.get_replica_context().all_reduce("SUM", x)

for step in range(100_000):
    strategy.run(train_step, args=(ones,))
    if step == 20:
        print("pid", os.getpid(), flush=True)
"""


def pids_of(launcher):
    """Of both workers, which are in the middle of their steps."""
    pids = {}
    while len(pids) < 2:
        line = launcher.stdout.readline()
        assert line, "the launcher has ended"
        if found := re.match(r"worker (\d) +\| pid (\d+)", line):
            pids[int(found[1])] = int(found[2])
    return pids


def test_ctrl_c_ends_everything(tmp_path):
    with launched(tmp_path, ENDLESS) as launcher:
        pids_of(launcher)
        launcher.send_signal(signal.SIGINT)
        began = time.monotonic()
        rest = launcher.communicate(timeout=LIMIT_S)[0]
        until_gone(tmp_path)
        assert time.monotonic() - began < 2 * SOON_S
    assert launcher.returncode == 130, rest
    assert "SIGINT: ending worker 0, worker 1." in rest
    assert "will be killed" not in rest
    assert "stack trace" not in rest


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.rest
def test_a_worker_that_is_interrupted_ends_the_job(tmp_path, victim):
    """SIGINT is sent to one worker only."""
    with launched(tmp_path, ENDLESS) as launcher:
        pid = pids_of(launcher)[victim]
        os.kill(pid, signal.SIGINT)
        try:
            rest = launcher.communicate(timeout=SOON_S)[0]
        except subprocess.TimeoutExpired:  # Python drops an interrupt that comes while an object is destroyed
            os.kill(pid, signal.SIGINT)
            rest = launcher.communicate(timeout=LIMIT_S)[0]
    assert launcher.returncode != 0, rest
    assert f"worker {victim} | KeyboardInterrupt" in rest
    where = r"(in|after) its program number [1-9]\d+, #\d train_step"
    assert re.search(rf"PeerFailureError: worker {victim} raised an error \({where}\):", rest), rest
    assert f"worker {1 - victim} |     KeyboardInterrupt" in rest
    assert "did not end, and will be killed" not in rest


# --- fit ------------------------------------------------------------------------------------------------


def fitting(victim):
    """Keras's ``fit``; between its second and its third epoch a worker is killed."""
    import os
    import signal
    import sys
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    at = time.monotonic()

    class Killed(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            nonlocal at
            at = time.monotonic()
            if epoch == 1 and strategy.cluster_resolver.task_id == int(victim):
                os.kill(os.getpid(), signal.SIGKILL)

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x = np.ones((32, 3), np.float32)
    try:
        model.fit(x, x[:, :1], batch_size=8, epochs=4, verbose=0, callbacks=[Killed()])
    except rx.errors.PeerFailureError as error:
        report(text=str(error), tasks=list(error.tasks), after_s=time.monotonic() - at)
        sys.exit(3)
    report(done=True)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.long
def test_a_worker_that_is_killed_between_epochs_is_named(local_cluster, victim):
    cluster = local_cluster(2, environment=WITH_KERAS, timeout_s=LIMIT_S)
    cluster.start(fitting, [str(victim)])
    result = cluster.wait()["worker", 1 - victim]
    assert result.exit_code == 3, result.output
    assert result.report["tasks"] == [f"worker {victim}"]
    assert "died without a word" in result.report["text"]
    assert result.report["after_s"] < SOON_S


# --- data that end ---------------------------------------------------------------------------------------


def unknown_lengths(lengths):
    """A loop of steps over generators of batches of three rows: each worker has its own number of them."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    lengths = [int(length) for length in lengths.split(",")]
    strategy = rx.MultiWorkerMirroredStrategy()
    is_alone = strategy.num_replicas_in_sync == 1

    def rows_of(worker, number):
        x = np.random.default_rng(100 * worker + number).normal(size=(3, 4)).astype("float32")
        return x, x.sum(axis=1, keepdims=True)

    def batches(worker):
        for number in range(max(lengths) if is_alone else lengths[worker]):
            parts = [rows_of(w, number) for w, length in enumerate(lengths) if number < length]
            both = [np.concatenate(column) for column in zip(*parts, strict=True)]
            yield tuple(both) if is_alone else rows_of(worker, number)

    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(5, "tanh"), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1)

    def train_step(x, y):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss(((model(x) - y) ** 2).sum(axis=1))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    data = strategy.distribute_datasets_from_function(lambda context: batches(context.input_pipeline_id))
    losses = [
        float(strategy.reduce("SUM", strategy.run(train_step, args=batch), axis=None)) for batch in data
    ]
    report(losses=losses, weights=[np.asarray(weight).tolist() for weight in model.get_weights()])


@pytest.mark.parametrize("lengths", ["4,2", "1,4"])
@pytest.mark.long
def test_worker_whose_data_end_early_continues_without_rows(local_cluster, lengths):
    """The numbers are those of one device with the same global batches."""
    found = {}
    for num_workers in (1, 2):
        cluster = local_cluster(num_workers, environment=WITH_KERAS, timeout_s=LIMIT_S)
        cluster.start(unknown_lengths, [lengths])
        results = cluster.wait()
        results.raise_if_failed()
        found[num_workers] = [result.report for result in results.values()]
    (expected,) = found[1]
    assert len(expected["losses"]) == 4
    for got in found[2]:
        np.testing.assert_allclose(got["losses"], expected["losses"], rtol=1e-5)
        for weight, wanted in zip(got["weights"], expected["weights"], strict=True):
            np.testing.assert_allclose(weight, wanted, rtol=1e-5, atol=1e-6)


def leaving_a_loop(victim, then):
    """One worker leaves a loop over batches early; it ends, or continues with something else."""
    import sys
    import time

    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id

    def step(x):
        return rx.get_replica_context().all_reduce("SUM", x.sum())

    def evaluate(x):
        return rx.get_replica_context().all_reduce("SUM", x.sum() * 2)

    def batches():
        for number in range(60):
            yield np.full((4,), number, np.float32)

    at = time.monotonic()
    try:
        for number, batch in enumerate(strategy.experimental_distribute_dataset(batches())):
            at = time.monotonic()
            if index == int(victim) and number == 10:
                break
            strategy.run(step, args=(batch,))
        if then == "evaluates":
            strategy.run(evaluate, args=(batch,))
    except rx.errors.ClusterFailureError as error:
        report(kind=type(error).__name__, text=str(error), after_s=time.monotonic() - at)
        sys.exit(3)
    report(done=True)


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.long)])
@pytest.mark.rest
def test_a_worker_that_leaves_its_loop_early_and_ends_is_named(local_cluster, victim):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(leaving_a_loop, [str(victim), "ends"])
    results = cluster.wait()
    assert results["worker", victim].exit_code == 0
    result = results["worker", 1 - victim]
    assert result.exit_code == 3, result.output
    # The last word of the worker that ends is compared with what the other does: this may wait in its next program then.
    named = {
        "PeerFailureError": f"worker {victim} has ended its program",
        "ProgramMismatchError": f"worker {victim}: ",
    }
    assert named[result.report["kind"]] in result.report["text"]
    assert result.report["after_s"] < SOON_S


@pytest.mark.rest
def test_a_worker_that_leaves_its_loop_early_for_something_else_is_named(local_cluster):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(leaving_a_loop, ["1", "evaluates"])
    for result in cluster.wait().values():
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ProgramMismatchError"
        assert re.search(r"worker 1: about to run its program number \d+, .*evaluate", result.report["text"])
        assert result.report["after_s"] < SOON_S

"""Real processes are told to end: all save after the same step, and the next run continues as if nothing had happened."""

import random
import sys
import time

import numpy as np
import pytest

from task_reports import count, latest, wait_for_count

pytestmark = pytest.mark.timeout(300)
LIMIT_S = 120
SOON_S = 60
LONG = pytest.mark.long
NUM_STEPS = 60


def training(folder, fault="", grace_s="0", num_steps="60"):
    """Steps with a collective each, over an iterator whose position is saved too."""
    import os
    import sys
    import time

    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    is_again = os.environ["REPLICAX_RESTART_COUNT"] != "0"
    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        state = rx.Variable(jnp.zeros(()))
    data = np.random.default_rng(0).standard_normal(2 * int(num_steps)).astype(np.float32)
    dataset = rx.data.from_arrays(data).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    checkpoint = rx.Checkpoint(state=state, iterator=iterator)
    noticed_at = []

    def exit_fn():
        report(ended_after_s=time.monotonic() - noticed_at[0] if noticed_at else None)
        sys.exit(42)

    config = rx.experimental.TerminationConfig(grace_period=float(grace_s), exit_fn=exit_fn)
    watcher = rx.experimental.PreemptionWatcher()
    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, folder, termination_config=config
    )

    def note():
        while watcher.preemption_message is None:
            time.sleep(0.005)
        noticed_at.append(time.monotonic())
        report(noticed=watcher.preemption_message, after_steps=handler.total_run_calls)

    import threading

    threading.Thread(target=note, daemon=True).start()

    def step(batch):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(batch))
        state.assign(state * 0.5 + total)

    def train_step(number, batch):
        time.sleep(0.02)
        if number == 10 and index == 1 and not is_again:
            if fault == "compiles":
                keys = [jax.random.key(n) for n in range(5)]
                report(compiles=True)
                began = time.monotonic()
                jax.jit(lambda x: x * sum(jax.random.gamma(key, 2.0) for key in keys)).lower(1.0).compile()
                report(compiled_s=time.monotonic() - began)
            if fault == "dies":
                report(sleeps=True)
                time.sleep(3)
        if fault == "slow" and index == 1:
            time.sleep(0.3)
        strategy.run(step, args=(batch,))

    report(began_at=handler.total_run_calls)
    for number in range(handler.total_run_calls, int(num_steps)):
        if number == 3:
            report(is_training=True)
        while number == int(num_steps) - 5 and not is_again and watcher.preemption_message is None:
            time.sleep(0.01)  # who is to tell it has not had his turn
        handler.run(train_step, number, next(iterator))
        if number % 5 == 0:
            strategy.run(
                lambda: rx.get_replica_context().all_reduce("SUM", state * 1)
            )  # in which nothing is saved
    report(final=float(state), bits=np.float32(state).tobytes().hex(), calls=handler.total_run_calls)
    handler.close()


def expected_bits(num_steps=NUM_STEPS):
    """The results of one process with the same batches."""
    data = np.random.default_rng(0).standard_normal(2 * num_steps).astype(np.float32)
    state = np.float32(0)
    for one, other in data.reshape(num_steps, 2):
        state = np.float32(state * np.float32(0.5)) + np.float32(one + other)
    return np.float32(state).tobytes().hex()


def wait_for_ends(cluster):
    """The exit codes of all tasks."""
    return {key: task.wait(SOON_S).exit_code for key, task in cluster.tasks.items()}


def start_again(cluster):
    for kind, index in cluster.tasks:
        cluster.restart(kind, index)


def check_finished(cluster, num_steps=NUM_STEPS):
    assert set(wait_for_ends(cluster).values()) == {0}
    for task in cluster.tasks.values():
        assert latest(task, "calls") == num_steps
        assert latest(task, "bits") == expected_bits(num_steps)


@pytest.mark.parametrize(
    ("num_steps", "preempted"),
    [(60, [(0,)]), pytest.param(400, [(0,), (1,), (0, 1)] * 4, marks=[LONG, pytest.mark.timeout(900)])],
)
def test_preempted_tasks_resume_where_they_were(local_cluster, tmp_path, num_steps, preempted):
    """Worker 0, beside the controller, and others, also two at once, at random moments."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(training, [str(tmp_path), "", "0", str(num_steps)])
    began_at = []
    for number in range(len(preempted) + 1):
        for task in cluster.tasks.values():
            wait_for_count(task, "began_at", number + 1, SOON_S)
        starts = {latest(task, "began_at") for task in cluster.tasks.values()}
        assert len(starts) == 1
        began_at += starts
        if number == len(preempted):
            break
        time.sleep(random.uniform(0.1, 0.5))
        for victim in preempted[number]:
            cluster.tasks["worker", victim].terminate()
        assert set(wait_for_ends(cluster).values()) == {42}
        start_again(cluster)
    assert began_at == sorted(began_at)
    assert began_at[-1] > 0
    check_finished(cluster, num_steps)


@LONG
def test_while_one_task_compiles_and_the_other_waits_in_a_collective(local_cluster, tmp_path):
    """The signal is noticed at once; all save as soon as the compilation has ended."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(training, [str(tmp_path), "compiles"])
    cluster.tasks["worker", 1].wait_for_report("compiles", SOON_S)
    time.sleep(0.3)
    told = time.monotonic()
    cluster.tasks["worker", 0].terminate()
    for index in (0, 1):
        assert cluster.tasks["worker", index].wait_for_report("noticed", SOON_S) == "worker 0: SIGTERM"
    noticed_s = time.monotonic() - told
    assert not count(cluster.tasks["worker", 1], "compiled_s")
    assert noticed_s < cluster.tasks["worker", 1].wait_for_report("compiled_s", SOON_S) / 2
    assert set(wait_for_ends(cluster).values()) == {42}
    assert latest(cluster.tasks["worker", 1], "after_steps") == 10
    start_again(cluster)
    check_finished(cluster)
    assert latest(cluster.tasks["worker", 0], "began_at") == 12  # the next batch had been read


@LONG
def test_a_slow_task(local_cluster, tmp_path):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(training, [str(tmp_path), "slow"])
    cluster.tasks["worker", 0].wait_for_report("is_training", SOON_S)
    cluster.tasks["worker", 0].terminate()
    assert set(wait_for_ends(cluster).values()) == {42}
    start_again(cluster)
    check_finished(cluster)


@LONG
def test_a_death_while_the_others_wait_to_save(local_cluster, tmp_path):
    """The wait ends with the reason; the job resumes from the previous checkpoint, here none."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(training, [str(tmp_path), "dies"])
    cluster.tasks["worker", 1].wait_for_report("sleeps", SOON_S)
    cluster.tasks["worker", 0].terminate()
    cluster.tasks["worker", 0].wait_for_report("noticed", SOON_S)
    cluster.tasks["worker", 1].kill()
    ends = wait_for_ends(cluster)
    assert ends["worker", 1] == 137
    assert ends["worker", 0] == 1
    assert any("PeerFailureError: worker 1 died" in line for line in cluster.tasks["worker", 0].output)
    start_again(cluster)
    check_finished(cluster)


@LONG
def test_a_grace_period(local_cluster, tmp_path):
    """All save at once and continue, and save again before the time is over."""
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(training, [str(tmp_path), "slow", "6"])
    victim = cluster.tasks["worker", 1]
    victim.wait_for_report("is_training", SOON_S)
    victim.terminate()
    first = victim.wait_for_report("after_steps", SOON_S)
    assert set(wait_for_ends(cluster).values()) == {42}
    assert sorted(path.name for path in tmp_path.glob("ckpt-*"))[-1] == "ckpt-2"
    after_s = latest(victim, "ended_after_s")
    assert 1 < after_s < 6
    start_again(cluster)
    check_finished(cluster)
    assert latest(victim, "began_at") > first + 2


def scoped(folder):
    """The progress of the loop depends on saved state only; tasks without a signal wait for the task with one."""
    import os
    import sys
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        state, step = rx.Variable(jnp.zeros(())), rx.Variable(0)
    data = np.random.default_rng(0).standard_normal(120).astype(np.float32)
    iterator = iter(strategy.experimental_distribute_dataset(rx.data.from_arrays(data).batch(2)))
    checkpoint = rx.Checkpoint(state=state, step=step, iterator=iterator)
    watcher = rx.experimental.PreemptionWatcher()

    def exit_fn():
        is_told = watcher.preemption_message == f"worker {strategy.cluster_resolver.task_id}: SIGTERM"
        began, waits = time.monotonic(), os.path.join(folder, "waits")
        if is_told:
            while not os.path.exists(waits):
                time.sleep(0.01)
            time.sleep(1)
            began = time.monotonic()
        else:
            open(waits, "w").close()
        watcher.block_until_worker_exit(timeout_s=30)
        report(is_told=is_told, waited_s=time.monotonic() - began)
        sys.exit(42)

    handler = rx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver,
        checkpoint,
        folder,
        termination_config=rx.experimental.TerminationConfig(exit_fn=exit_fn),
    )

    def train_step(batch):
        total = rx.get_replica_context().all_reduce("SUM", jnp.sum(batch))
        state.assign(state * 0.5 + total)
        step.assign_add(1)

    report(began_at=int(step))
    with handler.watch_preemption_scope():
        while int(step) < 60:
            is_again = os.environ["REPLICAX_RESTART_COUNT"] != "0"
            while int(step) == 50 and not is_again and watcher.preemption_message is None:
                time.sleep(0.01)  # who is to tell it has not had his turn
            strategy.run(train_step, args=(next(iterator),))
            time.sleep(0.02)
            report(is_training=True)
    report(bits=np.float32(state).tobytes().hex(), calls=int(step))
    handler.close()
    watcher.close()


@pytest.mark.rest
def test_scope_and_tasks_that_wait_for_the_preempted_one(local_cluster, tmp_path):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(scoped, [str(tmp_path)])
    victim, other = cluster.tasks["worker", 1], cluster.tasks["worker", 0]
    victim.wait_for_report("is_training", SOON_S)
    victim.terminate()
    assert set(wait_for_ends(cluster).values()) == {42}
    assert (latest(victim, "is_told"), latest(other, "is_told")) == (True, False)
    assert latest(victim, "waited_s") < 15
    assert 0.5 < latest(other, "waited_s") < 25
    start_again(cluster)
    check_finished(cluster)
    assert 0 < latest(victim, "began_at") == latest(other, "began_at")


LAUNCHED = """
import os, signal
from pathlib import Path
{source}
import replicax as rx
told = []
if os.environ["REPLICAX_RESTART_COUNT"] in "012" and '"index": 1' in os.environ["TF_CONFIG"]:
    import threading, time
    def end():
        while not [1 for r in told if r.get("began_at") is not None]:
            time.sleep(0.05)
        time.sleep(0.3)
        os.kill(os.getpid(), signal.SIGTERM)
    threading.Thread(target=end, daemon=True).start()
import replicax.testing
rx.testing.report = lambda **values: (told.append(values), print(values, flush=True))
training(os.environ["REPLICAX_CHECKPOINT_DIR"])
"""


@LONG
def test_launch_restarts_preempted_tasks(tmp_path):
    """Three times, although no restart is allowed."""
    import inspect
    import subprocess

    script = tmp_path / "program.py"
    script.write_text(LAUNCHED.format(source=inspect.getsource(training)))
    result = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--workers", "2", "--plain", "--devices-per-worker", "1"]
        + ["--checkpoint-dir", str(tmp_path / "checkpoints"), str(script)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stderr + result.stdout
    assert result.stderr.count("Starting all tasks again; this restart is not counted.") == 3
    assert result.stdout.count(f"'bits': '{expected_bits()}'") == 2

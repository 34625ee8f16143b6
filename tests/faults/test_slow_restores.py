"""A worker whose read of the checkpoint is slow, or hangs: the others wait for it, with a limit, and name it."""

import re

import pytest

pytestmark = [pytest.mark.timeout(250), pytest.mark.rest]
LIMIT_S = 150
SOON_S = 30


def resuming(folder, slow_worker, seconds):
    """Restores the newest checkpoint and trains four more steps; one worker's first read takes some seconds."""
    import logging
    import os
    import sys
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    limit_s = 6 if float(seconds) > 6 else None
    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(timeout_seconds=limit_s)
    )
    with strategy.scope():
        total = rx.Variable(jnp.zeros(()))
    manager = rx.CheckpointManager(rx.Checkpoint(total=total), folder)
    read, reads = os.pread, []

    def reading_from_a_store(*arguments):
        if not reads and strategy.cluster_resolver.task_id == int(slow_worker):
            time.sleep(float(seconds))
        reads.append(arguments)
        return read(*arguments)

    def train_step(x):
        total.assign_add(rx.get_replica_context().all_reduce("SUM", x))

    os.pread = reading_from_a_store
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
    at = time.monotonic()
    try:
        manager.restore_or_initialize()
        first = float(total)
        for _ in range(4):
            strategy.run(train_step, args=(ones,))
        last = float(total)
    except rx.errors.ClusterFailureError as error:
        tasks, after_s = list(getattr(error, "tasks", ())), time.monotonic() - at
        report(kind=type(error).__name__, text=str(error), tasks=tasks, after_s=after_s)
        sys.exit(3)
    manager.save()
    manager.close()
    report(first=first, last=last, num_reads=len(reads))


@pytest.fixture
def saved(local_cluster, tmp_path):
    """A folder with a checkpoint after four steps."""
    folder = tmp_path / "checkpoints"
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(resuming, [str(folder), "-1", "0"])
    cluster.wait().raise_if_failed()
    return folder


@pytest.mark.parametrize(
    "slow_worker", [0, pytest.param(1, marks=pytest.mark.long)], ids=["chief", "another"]
)
def test_first_resume_completes_though_one_worker_reads_slowly(local_cluster, saved, slow_worker):
    """The others come to the first step, and its compilation, seconds before it."""
    cluster = local_cluster(2, environment={"REPLICAX_STALL_WARNING_S": "2"}, timeout_s=LIMIT_S)
    cluster.start(resuming, [str(saved), str(slow_worker), "5"])
    results = cluster.wait()
    results.raise_if_failed()
    for result in results.values():
        assert (result.report["first"], result.report["last"]) == (8.0, 16.0)
        assert result.report["num_reads"] > 0
    waiting = re.compile(
        rf"worker {1 - slow_worker} has been waiting \d s to agree on restoring ckpt-1 .* "
        rf"for worker {slow_worker} .*at \S*program.py:\d+ in resuming"
    )
    assert any(map(waiting.match, results["worker", 1 - slow_worker].output))


@pytest.mark.parametrize(
    "slow_worker", [pytest.param(0, marks=pytest.mark.long), 1], ids=["chief", "another"]
)
def test_wait_after_a_restore_ends_and_names_the_worker_whose_read_hangs(local_cluster, saved, slow_worker):
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(resuming, [str(saved), str(slow_worker), "15"])
    result = cluster.wait()["worker", 1 - slow_worker]
    assert result.exit_code == 3, result.output
    assert (result.report["kind"], result.report["tasks"]) == ("PeerFailureError", [f"worker {slow_worker}"])
    assert "restoring ckpt-1" in result.report["text"]
    assert re.search(r"at \S*program.py:\d+ in resuming", result.report["text"])
    assert result.report["after_s"] < 6 + SOON_S

"""The status of a job of two processes, as its chief serves it to `replicax top`."""

import json
import time
import urllib.request

import pytest

from replicax._src.cluster.layout import free_ports

pytestmark = pytest.mark.timeout(200)
LIMIT_S = 120


def steps_until(path):
    """Steps with collectives until a file exists. Each worker has data of its own, and those of worker 1 are slow."""
    import itertools
    import os
    import time

    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id

    def batches():
        for number in itertools.count():
            if index == 1:
                time.sleep(0.1)
            yield np.full((6, 1), os.path.exists(path) + 0 * number, np.float32)

    dataset = strategy.distribute_datasets_from_function(lambda context: batches())
    for batch in dataset:
        is_over = strategy.reduce("SUM", strategy.run(lambda x: x.sum(), args=(batch,)), axis=None)
        rx.summary.scalar("train/loss", 0.5)
        if float(is_over) > 0:
            break


@pytest.mark.rest
def test_chief_shows_all_processes_and_who_is_slow(local_cluster, tmp_path):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    environment = {"REPLICAX_STATUS_ADDRESS": address, "SLURM_RESTART_COUNT": "2"}
    cluster = local_cluster(2, environment=environment, timeout_s=LIMIT_S)
    cluster.start(steps_until, [str(tmp_path / "over")])

    def told():
        try:
            with urllib.request.urlopen(f"http://{address}/status.json", timeout=10) as answer:
                return {task["task"]: task for task in json.load(answer)["tasks"]}
        except OSError:  # it has not started
            return {}

    def is_clear(first, slow):
        """Only a task's own data count, not the wait for those of another."""
        shares = first["data_share"], slow["data_share"]
        return slow["state"] == "slow" and None not in shares and shares[1] > shares[0] + 0.2

    until = time.monotonic() + LIMIT_S
    while not ((tasks := told()) and is_clear(tasks["worker 0"], tasks["worker 1"])):
        assert time.monotonic() < until, tasks
        time.sleep(0.2)
    (tmp_path / "over").touch()
    cluster.wait().raise_if_failed()
    first, slow = tasks["worker 0"], tasks["worker 1"]
    assert first["state"] == "running"
    for task in (first, slow):
        assert task["pid"] == cluster.tasks["worker", int(task["task"][-1])].pid
        assert 0 < task["steps_per_s"] <= 10.5
        assert task["examples_per_s"] == pytest.approx(6 * task["steps_per_s"])
        assert (task["loss"], task["restarts"]) == (0.5, 2)
        assert task["resident_bytes"] > 20 << 20

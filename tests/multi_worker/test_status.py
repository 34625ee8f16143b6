"""The status of a job of two processes, as its chief serves it to `replicax top`."""

import json
import time
import urllib.request

import pytest

from replicax._src.cluster.machine_layout import free_ports

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


def fit_until(path):
    """Trains with fast steps until a file exists."""
    import os

    import keras
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential([keras.layers.Dense(1)])
        model.compile("sgd", "mse", metrics=["mae"])

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            seen = strategy.experimental_distribute_values_from_function(
                lambda _: np.float32(os.path.exists(path))
            )
            self.model.stop_training = float(strategy.reduce("SUM", seen, axis=None)) > 0

    rows = np.ones((400, 4), np.float32)
    model.fit(rows, rows[:, :1], batch_size=4, epochs=1_000_000, verbose=0, callbacks=[Stop()])


def status_at(address):
    try:
        with urllib.request.urlopen(f"http://{address}/status.json", timeout=10) as answer:
            return json.load(answer)
    except OSError:  # it has not started
        return {"tasks": [], "progress": None}


@pytest.mark.rest
def test_rows_are_of_one_moment_and_fit_shows_its_progress(local_cluster, tmp_path):
    """The steps of two workers in one program differ by one or two, however many there are in a second."""
    address = f"127.0.0.1:{free_ports(1)[0]}"
    cluster = local_cluster(2, environment={"REPLICAX_STATUS_ADDRESS": address}, timeout_s=LIMIT_S)
    cluster.start(fit_until, [str(tmp_path / "over")])
    until, seen = time.monotonic() + LIMIT_S, [(0, 0)]
    while len(seen) < 5:  # in a row
        assert time.monotonic() < until, seen
        time.sleep(0.5)
        status = status_at(address)
        steps = tuple(task["steps"] or 0 for task in status["tasks"])
        is_in_epoch = status["progress"] and status["progress"]["batch"]  # and not between two of them
        if len(steps) == 2 and is_in_epoch and steps > seen[-1] and min(steps) > 100:
            seen = [*seen, steps] if abs(steps[0] - steps[1]) <= 3 else [steps]
    (tmp_path / "over").touch()
    cluster.wait().raise_if_failed()
    progress = status["progress"]
    assert (progress["kind"], progress["num_turns"], progress["num_batches"]) == ("epoch", 1_000_000, 100)
    assert progress["batch"] <= 100
    assert progress["left_s"] > 0
    assert list(status["metrics"]) == ["mae"]
    assert status["job"]["strategy"] == "MultiWorkerMirroredStrategy"


@pytest.mark.rest
def test_chief_shows_all_processes_and_who_is_slow(local_cluster, tmp_path):
    address = f"127.0.0.1:{free_ports(1)[0]}"
    environment = {"REPLICAX_STATUS_ADDRESS": address, "SLURM_RESTART_COUNT": "2"}
    cluster = local_cluster(2, environment=environment, timeout_s=LIMIT_S)
    cluster.start(steps_until, [str(tmp_path / "over")])

    def told():
        return {task["task"]: task for task in status_at(address)["tasks"]}

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

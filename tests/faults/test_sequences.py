"""Two workers that wait in different places: both get an error that names both places. Real processes.

The rules for all pairs are in ``tests/cluster/test_sequence_of_pairs.py``.
"""

import pytest

from checks import path_of_programs

pytestmark = pytest.mark.timeout(200)
LIMIT_S = 150
SOON_S = 100  # nobody else would say it before many minutes, if at all


def pair(first, second, folder, num_common="2"):
    """Makes all calls several times on both workers. Then worker 0 makes only the first, and worker 1 the second."""
    import os
    import sys
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    index = strategy.cluster_resolver.task_id
    with strategy.scope():
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    x, y = np.ones((8, 2), np.float32), np.ones((8, 1), np.float32)
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.ones(1, np.float32))
    rows = strategy.distribute_datasets_from_function(lambda context: (np.ones(2) for _ in range(10_000)))
    checkpoint = rx.Checkpoint(total=total)
    numbers = iter(range(10_000))
    saved = []
    batches = None

    def step(x):
        total.assign_add(x[0])
        return rx.get_replica_context().all_reduce("SUM", x)

    def run():
        result = strategy.experimental_local_results(strategy.run(step, args=(ones,)))[0]
        assert np.asarray(result) == [2.0], "it met another collective"

    def save():
        saved.append(checkpoint.save(os.path.join(folder, f"of step {next(numbers)}")))

    def take():
        nonlocal batches
        batches = batches or iter(rows)
        next(batches)

    calls = {
        "run": run,
        "on_read": lambda: float(total),
        "reduce": lambda: float(strategy.reduce("SUM", ones, axis=0)),
        "gather": lambda: np.asarray(strategy.gather(ones, axis=0)),
        "fit": lambda: model.fit(x, y, batch_size=8, verbose=0),
        "evaluate": lambda: model.evaluate(x, y, verbose=0),
        "predict": lambda: model.predict(x, verbose=0),
        "save": save,
        "restore": lambda: checkpoint.restore(saved[-1]),
        "dataset": take,
        "end": lambda: sys.exit(0),
    }
    used = [name for name in ("run", "save", first, second) if name != "end"]
    for _ in range(int(num_common)):
        for name in (*used, *reversed(used)):
            calls[name]()
    own = calls[second if index else first]
    at, num_calls = time.monotonic(), 0
    try:
        while num_calls < 1000:
            at = time.monotonic()
            own()
            num_calls += 1
    except rx.errors.ClusterFailureError as error:
        after_s = time.monotonic() - at
        report(kind=type(error).__name__, text=str(error), after_s=after_s, num_calls=num_calls)
        sys.exit(3)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("on_read", "run"),
        pytest.param("restore", "reduce", marks=pytest.mark.rest),
        *(
            pytest.param(*names, marks=pytest.mark.long)
            for names in [
                ("fit", "predict"),
                ("dataset", "save"),
                ("save", "run"),
                ("gather", "evaluate"),
                ("dataset", "run"),
                ("fit", "save"),
            ]
        ),
    ],
)
def test_workers_in_different_places_are_told_both_places(local_cluster, tmp_path, first, second):
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}
    cluster = local_cluster(2, timeout_s=LIMIT_S, environment=environment)
    cluster.start(pair, [first, second, str(tmp_path)])
    results = list(cluster.wait().values())
    for result in results:
        assert result.exit_code == 3, result.output
        assert result.report["kind"] == "ProgramMismatchError", result.report
        for worker, name in enumerate((first, second)):
            (line,) = [line for line in result.report["text"].splitlines() if f"  worker {worker}: " in line]
            assert "program.py:" in line, line
            assert any(word in line for word in WORDS[name]), (name, line)
    assert min(result.report["after_s"] for result in results) < SOON_S
    if first == "on_read":
        assert results[0].report["num_calls"] == 0, "a read by one worker alone gave a number"


WORDS = {
    "run": ["step"],
    "on_read": ["reading variable"],
    "reduce": ["strategy.reduce"],
    "gather": ["strategy.gather"],
    "fit": ["to start fit", "fit, at"],
    "evaluate": ["to start evaluate", "evaluate, at"],
    "predict": ["to start predict", "predict, at"],
    "save": ["(checkpoint)"],
    "restore": ["(checkpoint)"],
    "dataset": ["the next batch of a dataset"],
}


def late(seconds, folder):
    """Correct programs of which worker 1 is late; a thread of the program reads ahead, and saves are asynchronous."""
    import os
    import queue
    import threading
    import time

    import jax
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    late_s = float(seconds) * strategy.cluster_resolver.task_id
    with strategy.scope():
        total = rx.Variable(0.0, synchronization="ON_READ", aggregation="SUM")
    rows = strategy.distribute_datasets_from_function(
        lambda context: (np.ones(2, np.float32) for _ in range(20 + context.input_pipeline_id))
    )
    manager = rx.CheckpointManager(rx.Checkpoint(total=total), os.path.join(folder, "saved"), max_to_keep=2)
    ready = queue.Queue(2)

    def read():
        for batch in rows:
            ready.put(batch)
        ready.put(None)

    def step(batch, is_last):
        time.sleep(late_s)  # it compiles for a long time
        total.assign_add(jax.numpy.sum(batch))
        everyone = rx.get_replica_context().all_reduce("SUM", total.value)

        def after(value):
            time.sleep(late_s)  # the other worker has left the program by then

        if is_last:
            jax.debug.callback(after, everyone)
        return everyone

    def train():
        num_steps = 0
        while (batch := ready.get()) is not None:
            is_last = num_steps == 20
            strategy.run(step, args=(batch, is_last))
            if num_steps % 5 == 0:
                manager.save()
            num_steps += 1
        report(num_steps=num_steps, total=float(total))
        time.sleep(late_s)
        manager.save()
        manager.wait()
        manager.restore_or_initialize()
        report(restored=float(total))

    threading.Thread(target=read, daemon=True).start()
    if os.environ.get("IN_A_THREAD"):
        trainer = threading.Thread(target=train)
        trainer.start()
        trainer.join()
    else:
        train()


@pytest.mark.parametrize(
    ("seconds", "thread"),
    [
        pytest.param("4", "", marks=pytest.mark.long),
        pytest.param("2", "yes", marks=pytest.mark.rest),
        pytest.param("60", "", marks=[pytest.mark.long, pytest.mark.timeout(600)]),
    ],
)
def test_late_worker_is_no_mismatch(local_cluster, tmp_path, seconds, thread):
    environment = {"KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs(), "IN_A_THREAD": thread}
    cluster = local_cluster(2, timeout_s=500, environment=environment)
    cluster.start(late, [seconds, str(tmp_path)])
    results = cluster.wait()
    results.raise_if_failed()
    for result in results.values():
        assert result.report["num_steps"] == 21
        assert result.report["total"] == result.report["restored"] == 2.0 * (20 + 21)

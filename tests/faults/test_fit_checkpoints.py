"""``fit`` of several processes with CheckpointCallback is ended or killed and restarted: the result is bit-identical."""

import random
import time

import pytest

from launched_jobs import source_of
from task_reports import latest, wait_for_count
from training_pieces import bits_of, model_with_random_layers

pytestmark = [pytest.mark.timeout(450), pytest.mark.rest]
LIMIT_S = 120
SOON_S = 150
EPOCHS, BATCHES = 3, 10


def fitting(folder, shard_state="", data="arrays", is_interrupted=""):
    """A model with dropout and batch normalisation on shuffled rows; prints the logs of each epoch, and all bits at
    the end.

    An interrupted process does not end before that.
    """
    import os
    import time

    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy(shard_state=shard_state or None)
    model = model_with_random_layers(strategy, units=8, outputs=2)
    x = np.random.default_rng(0).normal(size=(38, 4)).astype("float32")
    given = {"x": x, "y": x[:, :2], "batch_size": 4}
    if data == "rx":
        given = {"x": rx.data.from_arrays((x, x[:, :2])).shuffle(seed=3).batch(4)}

    is_held = is_interrupted and os.environ["REPLICAX_RESTART_COUNT"] == "0"

    class Slow(keras.callbacks.Callback):
        def on_train_begin(self, logs=None):
            self.num_batches = 0

        def on_train_batch_begin(self, batch, logs=None):
            if not self.num_batches:
                self.watcher = (
                    rx.experimental.PreemptionWatcher()
                )  # made, and told, after the callback that saves
                report(began_at=callback.restored_from or "the beginning")
            self.num_batches += 1
            time.sleep(0.02)
            while is_held and self.num_batches == 25 and self.watcher.preemption_message is None:
                time.sleep(0.01)

    callback = rx.keras.callbacks.CheckpointCallback(folder, save_freq=3)
    slow, models, save = Slow(), [], model.save
    model.save = lambda *args, **kwargs: models.append(save(*args, **kwargs))
    of_keras = keras.callbacks.ModelCheckpoint(f"{folder}/model.keras")
    callbacks = [callback, of_keras, slow]
    history = model.fit(epochs=3, verbose=0, callbacks=callbacks, validation_data=(x, x[:, :2]), **given)
    report(
        bits=bits_of([*model.variables, *model.optimizer.variables]),
        history=history.history,
        num_batches=slow.num_batches,
        num_written=callback.manager.statistics()["num_saved"],
        num_models=len(models),
    )


def backing_up(folder, num_epochs):
    """With Keras's own callback."""
    import keras
    import numpy as np

    import replicax as rx
    from replicax.testing import report

    strategy = rx.MultiWorkerMirroredStrategy()
    keras.utils.set_random_seed(int(num_epochs))  # of which nothing is to be left
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])
        model.compile(keras.optimizers.Adam(0.01), "mse")
    x = np.random.default_rng(0).normal(size=(40, 4)).astype("float32")
    backup = keras.callbacks.BackupAndRestore(folder, delete_checkpoint=False)
    weights, save = [], model.save_weights
    model.save_weights = lambda *args, **kwargs: weights.append(save(*args, **kwargs))
    history = model.fit(x, x[:, :2], batch_size=4, epochs=int(num_epochs), verbose=0, callbacks=[backup])
    report(
        epochs=history.epoch,
        num_steps=int(model.optimizer.iterations),
        num_written=len(weights),
        kernel=np.asarray(model.layers[0].kernel).tolist(),
    )


def source_of_fitting():
    return f"{source_of(fitting)}\n\nimport sys\n\nfitting(*sys.argv[1:])\n"


def run_to_the_end(cluster, args):
    cluster.start(source_of_fitting(), args)
    assert {task.wait(SOON_S).exit_code for task in cluster.tasks.values()} == {0}
    return [(latest(task, "bits"), latest(task, "history")) for task in cluster.tasks.values()]


@pytest.mark.parametrize(
    ("faults", "shard_state", "data"),
    [
        pytest.param(["terminate"], "", "arrays", marks=pytest.mark.long),
        pytest.param(["terminate"], "all", "arrays", marks=pytest.mark.long),
        pytest.param(["kill", "terminate"], "", "rx", marks=pytest.mark.long),
        pytest.param(
            ["kill", "terminate"] * 4, "", "arrays", marks=[pytest.mark.long, pytest.mark.timeout(900)]
        ),
    ],
    ids=["told", "told_with_sharded_state", "dataset", "many"],
)
def test_terminated_workers_resume_in_the_middle_of_an_epoch(
    local_cluster, tmp_path, faults, shard_state, data
):
    expected = run_to_the_end(
        local_cluster(2, timeout_s=LIMIT_S), [str(tmp_path / "whole"), shard_state, data]
    )
    cluster = local_cluster(2, timeout_s=LIMIT_S)
    cluster.start(source_of_fitting(), [str(tmp_path / "parts"), shard_state, data, "yes"])
    for number, fault in enumerate([*faults, None]):
        for task in cluster.tasks.values():
            wait_for_count(task, "began_at", number + 1, SOON_S)
        if fault is None:
            break
        time.sleep(random.uniform(0.1, 0.3))
        getattr(cluster.tasks["worker", random.randrange(2)], fault)()
        codes = {task.wait(SOON_S).exit_code for task in cluster.tasks.values()}
        assert codes == {42} if fault == "terminate" else 0 not in codes
        for kind, index in cluster.tasks:
            cluster.restart(kind, index)
    assert {task.wait(SOON_S).exit_code for task in cluster.tasks.values()} == {0}
    assert [(latest(task, "bits"), latest(task, "history")) for task in cluster.tasks.values()] == expected
    tasks = list(cluster.tasks.values())
    assert all(latest(task, "began_at") != "the beginning" for task in tasks)
    assert {latest(task, "num_batches") for task in tasks} < set(range(1, EPOCHS * BATCHES))
    assert latest(tasks[0], "num_written") == latest(tasks[1], "num_written") > 0
    assert [bool(latest(task, "num_models")) for task in tasks] == [True, False]


@pytest.mark.long
def test_backup_and_restore_of_keras(local_cluster, tmp_path):
    """The chief writes, and all start at the epoch after it."""
    for num_epochs, epochs in ((2, [0, 1]), (5, [2, 3, 4])):
        cluster = local_cluster(2, timeout_s=LIMIT_S)
        cluster.start(backing_up, [str(tmp_path / "backup"), str(num_epochs)])
        assert {task.wait(SOON_S).exit_code for task in cluster.tasks.values()} == {0}
        tasks = list(cluster.tasks.values())
        assert [latest(task, "epochs") for task in tasks] == [epochs, epochs]
        assert [latest(task, "num_steps") for task in tasks] == [num_epochs * BATCHES] * 2
        assert [latest(task, "num_written") for task in tasks] == [len(epochs), 0]
        assert latest(tasks[0], "kernel") == latest(tasks[1], "kernel")

"""Jobs whose workers read files of their own resume with fewer or more workers: every row trains once per epoch."""

import numpy as np
import pytest

from launched_jobs import LaunchedJob

pytestmark = [pytest.mark.timeout(280), pytest.mark.rest]
SOON_S = 120
SIZES = (9, 4, 6, 7, 3)
NUM_ROWS = sum(SIZES)


def looping_over_files(folder, num_steps, epochs, local=""):
    """Counts in a variable how often each row has trained, in ``epochs`` epochs; ends after some steps."""
    import os
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    rows = rx.data.from_text_lines(f"{folder}/part*.txt").map(np.int32).shuffle(5, seed=1).batch(4)
    iterator = iter(strategy.experimental_distribute_dataset(rows.repeat(epochs)))
    with strategy.scope():
        step = rx.Variable(0)
        counts = rx.Variable(jnp.zeros(29, jnp.int32))
    local = local and f"{local}/host-{jax.process_index()}"
    manager = rx.CheckpointManager(
        rx.Checkpoint(step=step, counts=counts, iterator=iterator),
        os.environ["REPLICAX_CHECKPOINT_DIR"],
        step_counter=step,
        checkpoint_interval=3,
        **({"local_directory": local, "local_every": 1} if local else {}),
    )
    manager.restore_or_initialize()
    print("from", int(step), flush=True)

    def update(batch):
        found = jnp.zeros(29, jnp.int32).at[batch].add(1)
        counts.assign_add(rx.get_replica_context().all_reduce("SUM", found))
        step.assign_add(1)

    for number, batch in enumerate(iterator):
        if number == num_steps:
            os._exit(3)  # what a kill leaves
        strategy.run(update, args=(batch,))
        manager.save()
        manager.wait()
    print("policy", iterator.dataset.source.describe()["policy"].partition(":")[0], flush=True)
    print("counts", counts.numpy().tolist(), flush=True)
    manager.close()
    sys.stdout.flush()


def fitting_files(folder, num_steps, epochs):
    """A model whose weight of a row counts how often that row has trained; ends after some steps."""
    import os

    import keras
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model = keras.Sequential(
            [keras.Input((29,)), keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")]
        )
        model.compile(keras.optimizers.SGD(1.0), keras.losses.MeanAbsoluteError(reduction="sum"))

    def example(line):
        return np.eye(29, dtype=np.float32)[int(line)], np.full(1, 1000, np.float32)

    rows = rx.data.from_text_lines(f"{folder}/part*.txt").map(example).shuffle(5).batch(4)

    class End(keras.callbacks.Callback):
        left = num_steps

        def on_train_batch_begin(self, batch, logs=None):
            self.left -= 1
            if self.left < 0:
                os._exit(3)

    saving = rx.keras.callbacks.CheckpointCallback(os.environ["REPLICAX_CHECKPOINT_DIR"], save_freq=1)
    model.fit(rows, epochs=epochs, verbose=0, callbacks=[End(), saving])
    print("counts", np.asarray(model.layers[0].kernel).astype(int)[:, 0].tolist(), flush=True)


def write(folder):
    rows = iter(range(NUM_ROWS))
    for number, size in enumerate(SIZES):
        text = "".join(f"{next(rows)}\n" for _ in range(size))
        (folder / f"part{number}.txt").write_text(text)


def run(folder, program, workers, num_steps, epochs, **options):
    said = [repr(str(folder)), num_steps, epochs, *(f"{name}={value!r}" for name, value in options.items())]
    with LaunchedJob(folder / "job", program, ", ".join(map(str, said)), workers=workers) as job:
        code = job.wait(SOON_S)
    assert (code == 0) == bool(job.printed("counts")), job.text()
    return job


def counts_of(job, num_workers):
    counts = [np.array(eval(text)) for _, text in job.printed("counts")]
    assert len(counts) == num_workers, job.text()
    return counts


@pytest.mark.parametrize(
    "workers", [*(pytest.param(w, marks=pytest.mark.long) for w in [(1, 2, 3), (3, 1)]), (2, 1)], ids=str
)
def test_loop_over_files_trains_every_row_once_per_epoch(tmp_path, workers):
    write(tmp_path)
    for number in workers[:-1]:
        run(tmp_path, looping_over_files, number, 4, 2)
    job = run(tmp_path, looping_over_files, workers[-1], 1000, 2)
    assert {text for _, text in job.printed("from")} == {str(1 + 3 * (len(workers) - 1))}
    assert {text for _, text in job.printed("policy")} == {"AUTO" if workers[-1] == 1 else "FILE"}
    for counts in counts_of(job, workers[-1]):
        np.testing.assert_array_equal(counts, 2)


@pytest.mark.long
def test_loop_over_files_resumes_from_the_disks_of_its_hosts(tmp_path):
    """The same number of workers resumes from the newest local checkpoint, another number from the shared one."""
    write(tmp_path)
    started = []
    for workers, num_steps in ((2, 5), (2, 3), (3, 1000)):
        job = run(tmp_path, looping_over_files, workers, num_steps, 2, local=str(tmp_path / "local"))
        started.append({text for _, text in job.printed("from")})
    assert started == [{"0"}, {"5"}, {"6"}]
    for counts in counts_of(job, 3):
        np.testing.assert_array_equal(counts, 2)


@pytest.mark.parametrize("workers", [pytest.param((2, 3, 1), marks=pytest.mark.long), (1, 2)], ids=str)
def test_fit_on_files_trains_every_row_once_per_epoch(tmp_path, workers):
    """The epochs after the resumed one are complete too, whatever number of batches that one had."""
    write(tmp_path)
    for number in workers[:-1]:
        run(tmp_path, fitting_files, number, 3, 3)
    job = run(tmp_path, fitting_files, workers[-1], 1000, 3)
    for counts in counts_of(job, workers[-1]):
        np.testing.assert_array_equal(counts, 3)

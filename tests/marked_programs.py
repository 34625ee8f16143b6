"""Programs for `replicax launch` whose state is consistent only at the boundaries that they mark (``save_on_failure``).

Each prints ``resumed N`` when it starts, ``mark N`` after each boundary, and ``bits`` of its state at the end. The
interval of checkpoints is longer than the program, so only a boundary that was saved after a failure is resumed from.
"""

from training_pieces import (
    bits_of,
    iterator_over,
    model_with_random_layers,
    momentum_training,
    restored_manager,
)


def looping(num_steps=60, pause_s=0.02):
    """A loop with momentum, dropout, and an iterator that reads ahead."""
    import time

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    training = momentum_training(strategy, batch_size=13)
    step, trained = training.step, {"weights": training.weights, "velocities": training.velocities}
    manager = restored_manager(rx.Checkpoint(step=step, iterator=training.iterator, **trained), step)
    print("resumed", int(step), flush=True)
    while int(step) < num_steps:
        strategy.run(training.update, args=(next(training.iterator),))
        time.sleep(pause_s)
        manager.save()
        print("mark", int(step), flush=True)
    manager.close()
    print("bits", bits_of([*training.weights, *training.velocities]), flush=True)


def playing(num_steps=60, pause_s=0.01):
    """Two programs in each iteration, of two models that need each other, and a step counted outside of both."""
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((500, 4)).astype(np.float32)
    iterator = iterator_over(strategy, rows, seed=2, batch_size=10)
    with strategy.scope():
        generator = rx.Variable(rng.standard_normal((4, 4)).astype(np.float32))
        critic = rx.Variable(rng.standard_normal((4, 1)).astype(np.float32))
        num_of_generator = rx.Variable(0)
        num_of_critic = rx.Variable(0)
    checkpoint = rx.Checkpoint(
        models=[generator, critic],
        counts=[num_of_generator, num_of_critic],
        iterator=iterator,
        progress={"iteration": 0, "means": []},
    )
    manager = restored_manager(checkpoint, lambda: checkpoint.progress["iteration"])
    counts = [int(num_of_generator), int(num_of_critic), checkpoint.progress["iteration"]]
    assert len({*counts, len(checkpoint.progress["means"])}) == 1, counts
    print("resumed", counts[0], flush=True)

    def of_critic(x):
        with rx.GradientTape() as tape:
            score = jnp.tanh(x @ generator.value) @ critic.value - x @ critic.value
            loss = rx.nn.compute_average_loss(score[:, 0] ** 2)
        (gradient,) = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [critic]))
        critic.assign_add(-0.01 * gradient)
        num_of_critic.assign_add(1)

    def of_generator(x):
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((jnp.tanh(x @ generator.value) @ critic.value)[:, 0] ** 2)
        (gradient,) = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, [generator]))
        generator.assign_add(-0.01 * gradient)
        num_of_generator.assign_add(1)
        return loss

    while checkpoint.progress["iteration"] < num_steps:
        batch = next(iterator)
        strategy.run(of_critic, args=(batch,))
        time.sleep(pause_s)
        loss = strategy.reduce("SUM", strategy.run(of_generator, args=(batch,)), axis=None)
        time.sleep(pause_s)
        progress = checkpoint.progress
        checkpoint.progress = {
            "iteration": progress["iteration"] + 1,
            "means": [*progress["means"], float(loss)],
        }
        manager.save()
        print("mark", checkpoint.progress["iteration"], flush=True)
    manager.close()
    print("bits", bits_of([generator, critic], checkpoint.progress), flush=True)


def counting(num_steps=60, pause_s=0.02):
    """A counter and a sum that are assigned outside of ``run``, and an array of the program that changes in place."""
    import time

    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(0.1))
    with strategy.scope():
        weight = rx.Variable(np.linspace(0, 1, 7, dtype=np.float32))
        step = rx.Variable(0)
        total = rx.Variable(0.0)
    seen = np.zeros(1000, np.int32)
    checkpoint = rx.Checkpoint(weight=weight, step=step, total=total, seen=seen)
    manager = restored_manager(checkpoint, step)
    seen = checkpoint.seen = np.array(checkpoint.seen)
    print("resumed", int(step), flush=True)
    assert seen.sum() == int(step)

    def update(x):
        change = rx.get_replica_context().all_reduce("SUM", x * weight.value)
        weight.assign(weight.value + change * 0.1)

    while int(step) < num_steps:
        strategy.run(update, args=(ones,))
        time.sleep(pause_s / 2)
        total.assign_add(float(weight.numpy().sum()))
        time.sleep(pause_s / 2)
        seen[int(step)] += 1
        step.assign_add(1)
        manager.save()
        print("mark", int(step), flush=True)
    manager.close()
    print("bits", bits_of([weight], float(total), seen.tolist()), flush=True)


def handling(num_steps=60, pause_s=0.02):
    """Steps that ``PreemptionCheckpointHandler.run`` marks."""
    import os
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    rows = np.random.default_rng(0).standard_normal((500, 4)).astype(np.float32)
    iterator = iterator_over(strategy, rows, seed=2, batch_size=10)
    with strategy.scope():
        weight = rx.Variable(jnp.ones(4))
    checkpoint = rx.Checkpoint(weight=weight, iterator=iterator)
    manager = rx.CheckpointManager(
        checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2, save_on_failure=True
    )
    handler = rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, manager)
    print("resumed", handler.total_run_calls, flush=True)

    def update(batch):
        change = rx.get_replica_context().all_reduce("SUM", (batch * weight.value).sum(axis=0))
        weight.assign(0.99 * weight.value - 1e-3 * change)

    for number in range(handler.total_run_calls, num_steps):
        handler.run(strategy.run, update, args=(next(iterator),))
        print("mark", number + 1, flush=True)
        time.sleep(pause_s)
    handler.close()
    manager.close()
    print("bits", bits_of([weight]), flush=True)


def saving_slowly(num_steps=40, pause_s=0.05, save_s=0.0, stuck_s=0.0):
    """Steps as in ``counting``. The save of a boundary takes long, or a step in which worker 0 is stuck."""
    import os
    import time

    import jax
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    number, restarts = strategy.cluster_resolver.task_id, int(os.environ["REPLICAX_RESTART_COUNT"])
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
    with strategy.scope():
        weight = rx.Variable(np.zeros(3, np.float32))
    manager = restored_manager(rx.Checkpoint(weight=weight), lambda: weight.numpy()[0])
    write = manager._keeper._write

    def write_slowly(boundary):
        print("begins to save", int(boundary.held["weight"].value[0]), flush=True)
        time.sleep(save_s)
        write(boundary)
        print("has saved", flush=True)

    manager._keeper._write = write_slowly
    first = int(weight.numpy()[0])
    print("resumed", first, flush=True)

    def stick(x):
        if (number, restarts) == (0, 0) and x == 10 and stuck_s:
            print("stuck", flush=True)
            time.sleep(stuck_s)
        return np.asarray(x)

    def update(x):
        if stuck_s:
            x += 0 * jax.pure_callback(stick, jax.ShapeDtypeStruct((), np.float32), weight.value[0])
        weight.assign_add(rx.get_replica_context().all_reduce("MEAN", x) * np.ones(3, np.float32))

    for step in range(first, num_steps):
        strategy.run(update, args=(ones,))
        time.sleep(pause_s)
        manager.save()
        print("mark", step + 1, flush=True)
    manager.close()
    print("bits", weight.numpy().tolist(), flush=True)


def reading(num_steps=60, pause_s=0.02):
    """An iterator that reads ahead in files of which each worker has its own, and a random state of each worker."""
    import os
    import pathlib
    import time

    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    number = strategy.cluster_resolver.task_id
    folder = pathlib.Path(os.environ["REPLICAX_CHECKPOINT_DIR"]).parent / "files"
    files = [folder / f"part-{n}.csv" for n in range(8)]
    dataset = rx.data.from_csv(files).shuffle(buffer_size=16, seed=3).repeat().batch(6)
    iterator = iter(strategy.experimental_distribute_dataset(dataset, distribute_options="FILE"))

    class Own:
        def __init__(self):
            self.rng = np.random.default_rng(100 + number)
            self.drawn = []

        def get_state(self):
            return {"rng": self.rng.bit_generator.state, "drawn": self.drawn}

        def set_state(self, state):
            self.rng.bit_generator.state, self.drawn = state["rng"], state["drawn"]

    own = Own()
    with strategy.scope():
        weight = rx.Variable(jnp.zeros(2))
        step = rx.Variable(0)
    checkpoint = rx.Checkpoint(weight=weight, step=step, iterator=iterator, own=own)
    manager = restored_manager(checkpoint, step)
    print("resumed", int(step), flush=True)
    assert len(own.drawn) == int(step)

    def update(batch, noise):
        x = jnp.stack([batch["a"], batch["b"]], axis=1).astype(jnp.float32)
        change = rx.get_replica_context().all_reduce("SUM", x.sum(axis=0) * 1e-3 + noise)
        weight.assign(0.9 * weight.value + change)
        step.assign_add(1)

    while int(step) < num_steps:
        own.drawn.append(round(float(own.rng.standard_normal()), 3))
        noise = strategy.experimental_distribute_values_from_function(lambda _: np.float32(own.drawn[-1]))
        strategy.run(update, args=(next(iterator), noise))
        time.sleep(pause_s)
        manager.save()
        print("mark", int(step), flush=True)
    manager.close()
    drawn = strategy.gather(
        strategy.experimental_distribute_values_from_function(lambda _: np.float32([sum(own.drawn)])), axis=0
    )
    print("bits", bits_of([weight], np.asarray(drawn).tolist()), flush=True)


def refusing():
    """State that is divided over the processes, and state that is not."""
    import os

    import keras
    import numpy as np

    import replicax as rx

    directory = os.environ["REPLICAX_CHECKPOINT_DIR"]

    def tried(name, make):
        try:
            make().close()
        except rx.errors.UnsupportedError as error:
            print("refused", name, "divided over the processes" in str(error), flush=True)
        else:
            print("accepted", name, flush=True)

    def managed(**objects):
        return rx.CheckpointManager(rx.Checkpoint(**objects), directory, save_on_failure=True)

    strategy = rx.MultiWorkerMirroredStrategy()
    sharded = rx.MultiWorkerMirroredStrategy(shard_state="optimizer")
    models = []
    for each in (strategy, sharded):
        with each.scope():
            models.append(keras.Sequential([keras.Input((4,)), keras.layers.Dense(64)]))
            models[-1].compile("adam", "mse", metrics=["mae"])
    with strategy.scope():
        v = rx.Variable(np.zeros(3, np.float32))
        total = rx.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
        added = keras.optimizers.SGD(gradient_accumulation_steps=2)
        added.build(models[0].trainable_variables)
    tried("variable", lambda: managed(v=v))
    tried("on_read", lambda: managed(v=v, total=total))
    tried("accumulated", lambda: managed(v=v, optimizer=added))
    tried("model", lambda: managed(model=models[0]))
    tried("sharded", lambda: managed(model=models[1]))
    callback = rx.keras.callbacks.CheckpointCallback(directory + "-fit", save_on_failure=True)
    rows = np.ones((8, 4), np.float32)
    try:
        models[1].fit(rows, rows[:, :1], verbose=0, callbacks=[callback])
    except rx.errors.UnsupportedError:
        print("refused fit", flush=True)


def fitting(epochs=3, pause_s=0.02):
    """Keras's fit with dropout, batch normalisation and validation, on shuffled rows."""
    import os
    import time

    import keras
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    model = model_with_random_layers(strategy)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            time.sleep(pause_s)

    rows = np.random.default_rng(0).standard_normal((258, 8)).astype(np.float32)
    saving = rx.keras.callbacks.CheckpointCallback(
        os.environ["REPLICAX_CHECKPOINT_DIR"], save_freq=1000, save_on_failure=True
    )
    mark = rx.CheckpointManager.mark_boundary
    is_new = [True]

    def marking(manager):
        progress = manager.checkpoint.fit["progress"]
        mark(manager)
        print("mark", progress.num_batches, flush=True)

    class Resumed(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            if is_new:
                is_new.clear()
                print("resumed", saving.manager.checkpoint.fit["progress"].num_batches, flush=True)

    rx.CheckpointManager.mark_boundary = marking
    history = model.fit(
        rows,
        rows[:, :1],
        batch_size=13,
        epochs=epochs,
        validation_data=(rows[:40], rows[:40, :1]),
        verbose=0,
        callbacks=[Steps(), Resumed(), saving],
    )
    print("bits", bits_of([*model.variables, *model.optimizer.variables], history.history), flush=True)

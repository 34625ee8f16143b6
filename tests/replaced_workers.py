"""Programs for `replicax launch` with fault tolerance, whose tasks kill themselves where they are told, and wait for
their replacements where they are told."""

from training_pieces import Moments, bits_of


def replaced_fit(dies=(), waits=(), preempts=(), epochs=3, save_freq="epoch", has_saver=True):
    """``fit`` with validation and an EarlyStopping that ends it, then ``evaluate``: five steps in an epoch."""
    import os

    import keras
    import numpy as np

    import replicax as rx

    keras.utils.set_random_seed(1)
    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    moments = Moments(strategy.cluster_resolver.task_id, dies, waits, preempts)

    class Reached(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            moments.reach(f"step {5 * self.epoch + batch + 1}")

        def on_test_begin(self, logs=None):
            moments.reach(f"validation {getattr(self, 'epoch', None)}")

        def on_epoch_end(self, epoch, logs=None):
            moments.reach(f"end {epoch}")

    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
    y = x[:, :1]
    saver = rx.keras.callbacks.CheckpointCallback(os.environ["REPLICAX_CHECKPOINT_DIR"], save_freq=save_freq)
    stopping = keras.callbacks.EarlyStopping(patience=2, min_delta=10.0, restore_best_weights=True)
    history = model.fit(
        *(x, y),
        batch_size=12,
        epochs=epochs,
        verbose=0,
        validation_data=(x, y),
        validation_batch_size=12,
        callbacks=[Reached(), stopping, *([saver] if has_saver else [])],
    ).history
    loss = model.evaluate(x, y, batch_size=12, verbose=0)
    drawn = float(np.random.random())
    print("epochs", len(history["loss"]), flush=True)
    print("bits", bits_of([*model.variables, *model.optimizer.variables], history, loss, drawn), flush=True)


def replaced_loop(dies=(), waits=(), epochs=3, uses_handler=False):
    """A loop with a custom step, a shuffled dataset, and a save after each step, or ``PreemptionCheckpointHandler``."""
    import os

    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    moments = Moments(strategy.cluster_resolver.task_id, dies, waits)
    x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
    data = rx.data.from_arrays((x, x[:, :1])).shuffle(60, seed=3).batch(12)
    with strategy.scope():
        step, epoch = rx.Variable(0, trainable=False), rx.Variable(0, trainable=False)
        weights, velocity = rx.Variable(np.ones((4, 1), "float32")), rx.Variable(np.zeros((4, 1), "float32"))
    iterator = iter(strategy.experimental_distribute_dataset(data))
    losses = []

    class Losses:
        def get_state(self):
            return losses

        def set_state(self, state):
            losses[:] = state

    checkpoint = rx.Checkpoint(
        step=step, epoch=epoch, weights=weights, velocity=velocity, iterator=iterator, losses=Losses()
    )
    manager = rx.CheckpointManager(
        checkpoint,
        os.environ["REPLICAX_CHECKPOINT_DIR"],
        step_counter=step,
        checkpoint_interval=4,
        max_to_keep=2,
    )

    def train_step(batch):
        features, labels = batch
        with rx.GradientTape() as tape:
            loss = rx.nn.compute_average_loss((features @ weights.value - labels)[:, 0] ** 2)
        gradient = tape.gradient(loss, [weights])[0]
        gradient = rx.get_replica_context().all_reduce("SUM", gradient)
        velocity.assign(0.9 * velocity + gradient)
        weights.assign_sub(0.05 * velocity.value)
        return loss

    @rx.function
    def distributed(batch):
        return strategy.reduce("SUM", strategy.run(train_step, args=(batch,)), axis=None)

    def train(batch):
        losses.append(float(distributed(batch)))
        step.assign_add(1)

    if uses_handler:
        handler = rx.experimental.PreemptionCheckpointHandler(strategy.cluster_resolver, manager)
    else:
        manager.restore_or_initialize()
    for number in range(int(epoch), epochs):
        for batch in iterator:
            if uses_handler:
                moments.reach(f"before {int(step)}")
                handler.run(train, batch)
            else:
                train(batch)
                moments.reach(f"step {int(step)}")
                manager.save()
        iterator.initialize()
        epoch.assign(number + 1)
        if not uses_handler:
            manager.save(check_interval=False)
    print("steps", int(step), flush=True)
    print("saved", manager.checkpoint.save_counter, flush=True)
    print("bits", bits_of([weights, velocity], losses), flush=True)

"""A program for `replicax launch` that trains with fault tolerance and saves; tasks kill themselves where they are
told."""

from training_pieces import bits_of


def saving(epochs=3, save_freq=3, dies=(), preempted_at=None, tolerates_failures=True):
    """``fit`` with a CheckpointCallback and validation, then ``evaluate``: five steps in an epoch. A resumed job prints
    the steps that it trains, the checkpoint from which it resumes, and all print ``bits`` and ``losses`` at the end.

    Args:
      epochs, save_freq: For ``fit`` and the callback.
      dies: The number of a task and a moment, for each task that dies in the first start of the job.
      preempted_at: The number of a task and of a step, for one that gets SIGTERM in the first start.
      tolerates_failures: False for the default mode.
    """
    import os
    import signal

    import keras
    import numpy as np

    import replicax as rx
    from replicax._src.checkpoint import writing

    keras.utils.set_random_seed(1)
    strategy = rx.MultiWorkerMirroredStrategy(**({"fault_tolerance": True} if tolerates_failures else {}))
    number, is_first = strategy.cluster_resolver.task_id, os.environ["REPLICAX_RESTART_COUNT"] == "0"

    def die(moment):
        if is_first and (number, moment) in dies:
            print(f"dies {moment}\n", end="", flush=True)  # in one write, because threads print
            os.kill(os.getpid(), signal.SIGKILL)

    def dying(what, function, position):
        def call(*args):
            die(f"{what} {os.path.basename(args[position]).partition('.')[0]}")
            return function(*args)

        return call

    writing.write_pieces = dying("writing", writing.write_pieces, 0)
    writing._take_place = dying("naming", writing._take_place, 1)

    class Moments(keras.callbacks.Callback):
        num_steps = 0

        def on_train_batch_begin(self, batch, logs=None):
            self.num_steps += 1
            die(f"before step {self.num_steps}")

        def on_train_batch_end(self, batch, logs=None):
            print(f"step {self.num_steps}\n", end="", flush=True)
            if is_first and preempted_at == (number, self.num_steps):
                os.kill(os.getpid(), signal.SIGTERM)

        def on_test_begin(self, logs=None):
            die(f"evaluating after step {self.num_steps}")

        def on_epoch_end(self, epoch, logs=None):
            die(f"end of epoch {epoch}")
            if rx.is_chief():
                print("chief", epoch, flush=True)

    with strategy.scope():
        layers = [keras.layers.Dense(3), keras.layers.Dropout(0.3), keras.layers.Dense(1)]
        model = keras.Sequential([keras.Input((4,)), *layers])
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), "mse")
    x = np.random.default_rng(0).standard_normal((60, 4)).astype("float32")
    y = x[:, :1]
    saving = rx.keras.callbacks.CheckpointCallback(os.environ["REPLICAX_CHECKPOINT_DIR"], save_freq=save_freq)
    history = model.fit(
        *(x, y),
        batch_size=12,
        epochs=epochs,
        verbose=0,
        validation_data=(x, y),
        validation_batch_size=12,
        callbacks=[Moments(), saving],
    ).history
    print("resumed", os.path.basename(saving.restored_from or "nothing"), flush=True)
    loss = model.evaluate(x, y, batch_size=12, verbose=0)
    print("losses", *history["loss"], *history["val_loss"], loss, flush=True)
    print("bits", bits_of([*model.variables, *model.optimizer.variables], history, loss), flush=True)

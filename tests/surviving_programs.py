"""Programs for `replicax launch` whose ``fit`` goes on when workers die (``fault_tolerance``).

Each prints ``pid N``, ``step N`` after each step, and ``bits`` of its weights, its optimizer and its history at the
end. On SIGUSR1 it prints where all its threads are.
"""

from training_pieces import bits_of, model_of_kind, rows_to_learn


def surviving(
    kind="plain",
    batch_size=96,
    epochs=6,
    pause_s=0.0,
    min_workers=1,
    differs_in=None,
    saves=False,
    steps_per_execution=1,
    **fit_options,
):
    """``fit`` with shuffled rows and validation, then ``evaluate`` and ``predict``. An epoch has 31 steps.

    Args:
      kind: See ``model_of_kind``.
      batch_size: The rows of a step. The last step of an epoch has 50.
      epochs, pause_s: The number of epochs, and the pause after each step.
      min_workers: The fewest workers with which the training continues.
      differs_in: The number of a task that has another loss, so that its program differs.
      saves: True to save a checkpoint every ten steps, and to resume from the newest.
      steps_per_execution: For ``compile``.
      **fit_options: Further arguments of ``fit``.
    """
    import faulthandler
    import os
    import signal
    import time

    import keras

    import replicax as rx

    faulthandler.register(signal.SIGUSR1, all_threads=True)
    strategy = rx.MultiWorkerMirroredStrategy(
        fault_tolerance=rx.FaultToleranceOptions(min_workers=min_workers)
    )
    with strategy.scope():
        model, compiled_with = model_of_kind(kind)
        if strategy.cluster_resolver.task_id == differs_in:
            compiled_with["loss"] = "mae"
        model.compile(**compiled_with, steps_per_execution=steps_per_execution)

    class Steps(keras.callbacks.Callback):
        number = 0

        def on_train_batch_end(self, batch, logs=None):
            self.number += 1
            print("step", self.number, flush=True)
            time.sleep(pause_s)

    features, labels = rows_to_learn(30 * batch_size + 50)
    folder = os.environ["REPLICAX_CHECKPOINT_DIR"]
    saving = [rx.keras.callbacks.CheckpointCallback(folder, save_freq=10)] if saves else []
    history = model.fit(
        features,
        labels,
        batch_size=batch_size,
        epochs=epochs,
        validation_data=(features[: batch_size + 50], labels[: batch_size + 50]),
        verbose=0,
        callbacks=[Steps(), *saving],
        **fit_options,
    )
    evaluated = model.evaluate(features, labels, batch_size=batch_size, verbose=0)
    predicted = model.predict(features[:100], batch_size=50, verbose=0).tolist()
    bits = bits_of([*model.variables, *model.optimizer.variables], history.history, evaluated, predicted)
    print("bits", bits, flush=True)


def surviving_exactly(num_steps=300, pause_s=0.0):
    """Plain SGD on the same rows in the same order as one device, with batch normalisation. It writes its weights."""
    import os
    import time

    import keras
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    with strategy.scope():
        model, _ = model_of_kind("normalized")
        model.compile(keras.optimizers.SGD(0.05), "mse")

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print("step", batch, flush=True)
            time.sleep(pause_s)

    features, labels = rows_to_learn(30 * 97)
    model.fit(
        features, labels, batch_size=97, epochs=num_steps // 30, shuffle=False, verbose=0, callbacks=[Steps()]
    )
    number = strategy.cluster_resolver.task_id
    folder = os.path.dirname(os.environ["REPLICAX_CHECKPOINT_DIR"])
    np.savez(
        os.path.join(folder, f"worker-{number}.npz"), *[variable.numpy() for variable in model.variables]
    )
    print("bits", bits_of(model.variables), flush=True)

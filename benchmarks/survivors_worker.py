"""One worker of a job in ``survivors.py``: it trains with ``fit`` and writes when each step ended."""

import os
import sys
import time
from pathlib import Path

import keras

import fit_process
import replicax as rx

ROWS, NUM_EPOCHS = 128, 10**6

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
    number = strategy.cluster_resolver.task_id
    model_name = next(iter(fit_process.DENSE))
    with strategy.scope():
        model = fit_process.compiled_model(model_name, 1)
    (folder / f"pid-{number}").write_text(str(os.getpid()))

    class Ends(keras.callbacks.Callback):
        """Writes each time at once: the worker may be killed."""

        file = open(folder / f"ends-{number}", "w", buffering=1)  # noqa: SIM115

        def on_train_batch_end(self, batch, logs=None):
            self.file.write(f"{time.monotonic()}\n")

    features, labels = fit_process.data(model_name, 100 * ROWS)
    model.fit(features, labels, batch_size=ROWS, epochs=NUM_EPOCHS, verbose=0, callbacks=[Ends()])

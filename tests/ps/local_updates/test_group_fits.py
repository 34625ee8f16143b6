"""``fit`` in groups of two processes, under ``replicax launch --groups 2 --workers 2 --syncers 1``."""

import os
import re
import subprocess
import sys

import pytest

from checks import path_of_programs

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]

LIMIT_S = 240
# Worker 0 alone saves, and reads the outer parameters between two epochs. Worker 1 of group 0 alone stops all.
SCRIPT = """
import hashlib, os, sys
import keras
import numpy as np
import replicax as rx

groups = rx.experimental.LocalUpdates(every=4, fragments=2, quorum=2)
strategy = rx.MultiWorkerMirroredStrategy()
worker = strategy.cluster_resolver.task_id
keras.utils.set_random_seed(groups.index)

def new_model():
    layers = [keras.layers.Dense(8, "tanh"), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
    return keras.Sequential([keras.Input((6,)), *layers])

def say(word, epoch, model):
    values = b"".join(np.asarray(each).tobytes() for each in model.get_weights())
    digest = hashlib.sha256(values).hexdigest()[:16]
    print("said", word, f"group-{groups.index}", f"worker-{worker}", epoch, digest, flush=True)

class Watch(keras.callbacks.Callback):
    epoch = 0

    def on_test_begin(self, logs=None):
        say("outer", self.epoch, self.model)

    def on_epoch_end(self, epoch, logs=None):
        say("own", epoch, self.model)
        if worker == 0:
            with groups.outer():
                say("outer", epoch, self.model)
        self.epoch = epoch + 1
        if epoch == 2 and (groups.index, worker) == (0, 1):
            groups.stop()

with strategy.scope():
    model = new_model()
    model.compile(keras.optimizers.Adam(0.01), "mse")
saving = keras.callbacks.ModelCheckpoint(f"{sys.argv[1]}/{groups.index}-{{epoch}}.weights.h5", save_weights_only=True)
callbacks = [rx.keras.callbacks.LocalUpdatesCallback(groups, finish_timeout_s=60), Watch()]
x = np.random.default_rng(groups.index).normal(size=(70, 6)).astype("float32")
y = x[:, :1] - 0.5 * x[:, 1:2]
history = model.fit(
    x, y, batch_size=8, epochs=1000, validation_data=(x[:8], y[:8]), verbose=0,
    callbacks=[*callbacks, saving] if worker == 0 else callbacks,
)
assert len(history.epoch) < 1000
if worker == 0:
    saved = new_model()
    for epoch in history.epoch:
        saved.load_weights(f"{sys.argv[1]}/{groups.index}-{epoch + 1}.weights.h5")
        say("outer", epoch, saved)
say("end", groups.steps, model)
"""


def test_processes_of_a_group_stay_equal_and_all_groups_end_alike(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launched = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", "--plain", "--groups", "2", "--workers", "2"]
        + ["--syncers", "1", "--devices-per-worker", "1", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": path_of_programs(),
        },
    )
    text = launched.stdout + launched.stderr
    assert launched.returncode == 0, text[-5000:]
    said = re.findall(r"said (\w+) group-(\d) worker-(\d) (\d+) (\w+)", text)
    digests = {word: {} for word in ("own", "outer", "end")}
    for word, group, worker, epoch, digest in said:
        digests[word].setdefault((group, int(epoch)), []).append((worker, digest))
    for of_epoch in (digests["own"], digests["outer"]):
        for where, found in of_epoch.items():
            assert {worker for worker, _ in found} == {"0", "1"}, where
            assert len({digest for _, digest in found}) == 1, (where, found)
    assert all(
        len(found) == 4 for found in digests["outer"].values()
    )  # twice for validations, a context, a file
    assert all(digests["outer"][where][0][1] != own[0][1] for where, own in digests["own"].items())
    ends = [each for found in digests["end"].values() for each in found]
    assert len(ends) == 4
    assert len({digest for _, digest in ends}) == 1
    for group in "01":  # both processes of a group have made the same steps
        assert sum(len(found) == 2 for (of, _), found in digests["end"].items() if of == group) == 1

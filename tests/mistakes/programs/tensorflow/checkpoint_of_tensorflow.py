import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

rx.config.set_local_devices(2)
keras.utils.set_random_seed(0)
strategy = rx.MirroredStrategy()

x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")

os.makedirs("training_checkpoints")
for name in ("checkpoint", "ckpt-1.index", "ckpt-1.data-00000-of-00001"):  # as tf.train.Checkpoint wrote them
    with open(os.path.join("training_checkpoints", name), "wb") as file:
        file.write(b"x")

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
checkpoint = rx.Checkpoint(model=model)
checkpoint.restore(rx.checkpoint.latest_checkpoint("training_checkpoints"))

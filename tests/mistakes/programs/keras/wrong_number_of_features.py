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

with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(16, "relu"), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
history = model.fit(x[:, :5], y, batch_size=16, epochs=2, verbose=0)
print(history.history)

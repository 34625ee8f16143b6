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


class Dropping(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def call(self, inputs):
        self.num_calls += 1
        return inputs if self.num_calls < 3 else 0.5 * inputs


with strategy.scope():
    dropping = Dropping()
    model = keras.Sequential([keras.Input((8,)), dropping, keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(x, y, batch_size=16, epochs=3, verbose=0)
print("calls", dropping.num_calls)

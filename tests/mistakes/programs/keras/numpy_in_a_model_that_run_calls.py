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


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = keras.layers.Dense(2)

    def call(self, inputs):
        return self.dense(np.clip(np.asarray(inputs), -1.0, 1.0))


with strategy.scope():
    model = Net()
    model.build((None, 8))


def predict_step(features):
    return keras.ops.argmax(model(features), axis=-1)


dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(x).batch(16))
for features in dataset:
    print(strategy.run(predict_step, args=(features,)))

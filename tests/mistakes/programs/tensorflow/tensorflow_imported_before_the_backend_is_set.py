import os

import tensorflow as tf

os.environ["KERAS_BACKEND"] = "jax"
import keras
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()
train = tf.data.Dataset.from_tensor_slices(([[1.0], [2.0]], [[0.0], [1.0]])).batch(2)
with strategy.scope():
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(train, verbose=0)

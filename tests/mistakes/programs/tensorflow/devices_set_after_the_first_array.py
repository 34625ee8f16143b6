import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

class_weights = keras.ops.ones(3)
rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()
print(strategy.num_replicas_in_sync)

cat > train.py <<'END'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

strategy = rx.TPUStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 8)), np.ones((64, 2)), batch_size=64)
END
replicax plan --topology v5e-8 train.py

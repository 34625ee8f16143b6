cat > train.py <<'END'
import os

os.environ["KERAS_BACKEND"] = "jax"
import keras
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
worker = strategy.cluster_resolver.task_id
keras.utils.set_random_seed(0)
x = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
y = (x.sum(axis=1) > 0).astype("int32")
with strategy.scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))

model.fit(x, y, batch_size=16, verbose=0)
if worker == 0:
    print(model.evaluate(x, y, verbose=0))
END
replicax launch --workers 2 train.py

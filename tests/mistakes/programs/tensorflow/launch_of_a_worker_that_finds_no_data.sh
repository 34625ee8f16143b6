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

rows = np.load(f"part-{worker + 1}.npy")
model.fit(rows, y, batch_size=16, verbose=0)
END
python -c 'import numpy; numpy.save("part-1.npy", numpy.ones((64, 8), "float32"))'
replicax launch --workers 2 train.py

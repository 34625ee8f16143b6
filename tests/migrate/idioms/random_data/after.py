import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import tensorflow as tf
import replicax as rx
import keras
from keras import ops
import numpy as np

keras.utils.set_random_seed(3)
num = 64
features = tf.random.normal([num, 5], seed=1)
true_w = tf.constant([[1.0], [2.0], [-1.0], [0.5], [0.0]])
labels = tf.matmul(features, true_w) + 0.01 * tf.random.normal([num, 1], seed=2)
dataset = tf.data.Dataset.from_tensor_slices((features, labels)).batch(16)
print(features.shape, np.asarray(tf.reduce_mean(labels))[()].round(4))

strategy = rx.MirroredStrategy(["cpu:0"])
with strategy.scope():
    w = rx.Variable(ops.zeros([5, 1]))

def replica(x, y):
    with rx.GradientTape() as tape:
        loss = rx.nn.compute_average_loss(ops.sum((ops.matmul(x, w) - y) ** 2, axis=-1), global_batch_size=16)
    w.assign_sub(0.1 * tape.gradient(loss, w))
    return loss

for x, y in strategy.experimental_distribute_dataset(dataset):
    print("%.5f" % np.asarray(strategy.reduce("SUM", strategy.run(replica, (x, y)), axis=None))[()])
print(np.asarray(tf.reduce_mean(tf.square(tf.matmul(features, w) - labels)))[()].round(4))

import numpy as np
import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import tensorflow as tf
import replicax as rx
import jax.numpy as jnp
import optax

np.random.seed(0)
X = np.random.normal(size=(32, 3)).astype(np.float32)
Y = (X.sum(1) > 0).astype(np.int64)
MEAN = tf.constant([0.1, 0.2, 0.3])


def scale(x, y):
    x = tf.cast(x, tf.float32)
    return normalize(x), tf.one_hot(y, 2)


def normalize(x):
    return tf.math.subtract(x, MEAN)


def only_positive(x, y):
    return tf.reduce_sum(x) > -10.0


def input_fn(batch_size):
    dataset = tf.compat.v1.data.Dataset.from_tensor_slices((X, Y))
    dataset = dataset.filter(only_positive)
    dataset = dataset.map(scale, num_parallel_calls=tf.compat.v1.data.experimental.AUTOTUNE)
    return dataset.batch(batch_size).repeat(2)


w = rx.Variable(jnp.ones([3, 2]))


@rx.function
def train(x, y):
    with rx.GradientTape() as tape:
        logits = jnp.matmul(x, w)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, y))
    w.assign_sub(0.5 * tape.gradient(loss, w))
    return loss


for x, y in input_fn(8).as_numpy_iterator():
    print("%.5f" % train(x, y))
x, y = next(iter(input_fn(4).as_numpy_iterator()))
print(np.asarray(jnp.sum(x))[()], np.asarray(jnp.shape(y))[()])
print(np.asarray(tf.reduce_sum(normalize(tf.constant([[1.0, 2.0, 3.0]]))))[()])

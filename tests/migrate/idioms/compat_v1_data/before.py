import numpy as np
import tensorflow as tf
import tensorflow.compat.v1 as tf1

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


w = tf.Variable(tf.ones([3, 2]))


@tf.function
def train(x, y):
    with tf.GradientTape() as tape:
        logits = tf.matmul(x, w)
        loss = tf.reduce_mean(tf.nn.softmax_cross_entropy_with_logits(labels=y, logits=logits))
    w.assign_sub(0.5 * tape.gradient(loss, w))
    return loss


for x, y in input_fn(8):
    print("%.5f" % train(x, y))
x, y = next(iter(input_fn(4)))
print(tf.reduce_sum(x).numpy(), tf.shape(y).numpy())
print(tf.reduce_sum(normalize(tf.constant([[1.0, 2.0, 3.0]]))).numpy())

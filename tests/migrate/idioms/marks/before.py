"""What the command cannot know."""

import tensorflow as tf

strategy = tf.distribute.MirroredStrategy()
history = []
counter = tf.Variable(0.0)


def replica_step(x):
    counter.assign_add(1.0)
    print("step")
    history.append(x)
    loss = tf.reduce_mean(x * x)
    return loss


@tf.function
def doubled(x):
    if tf.reduce_sum(x) > 0:
        return x * 2
    return x


with tf.GradientTape() as tape:
    y = doubled(tf.ones((2,), tf.int64)) % 2**40
    history.append(y)

per_replica = strategy.run(replica_step, args=(y,))
strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=None)
# replicax migrate: ok
strategy.reduce(tf.distribute.ReduceOp.MEAN, per_replica, axis=0)
tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
tf.no_such_name(1)

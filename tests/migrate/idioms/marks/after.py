"""What the command cannot know."""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")

import tensorflow as tf
import replicax as rx
import jax.numpy as jnp

strategy = rx.MirroredStrategy()
history = []
# replicax migrate: this variable is made outside of strategy.scope(), and a replica function uses it. Make it
#   in `with strategy.scope():`.
counter = rx.Variable(0.0)


def replica_step(x):
    counter.assign_add(1.0)
    # replicax migrate: print runs once here, when the step is traced. Print with jax.debug.print; pass times
    #   and random values as arguments.
    print("step")
    # replicax migrate: history.append runs once here, when the step is traced. Return the value from the
    #   step, and append it after run.
    history.append(x)
    # replicax migrate: this mean is over the rows of one replica. For a loss whose gradient is taken, write
    #   rx.nn.compute_average_loss(losses).
    loss = jnp.mean(x * x)
    return loss


@rx.function
def doubled(x):
    # replicax migrate: if on a result of tf.reduce_sum, which is known only when the step runs. Write
    #   jnp.where or rx.cond, or Python values.
    if jnp.sum(x) > 0:
        return x * 2
    return x


# replicax migrate: a tape outside of functions. Put these lines into a function with @rx.function.
with rx.GradientTape() as tape:
    # replicax migrate: int64 is int32 in JAX, here and below. If a value needs more, set JAX_ENABLE_X64=1.
    y = doubled(jnp.ones((2,), dtype=jnp.int64)) % 2**40
    history.append(y)

per_replica = strategy.run(replica_step, args=(y,))
# replicax migrate: this mean counts each replica the same, however many rows it has. If replicas have
#   different numbers of rows, reduce sums of values and of rows, and divide.
strategy.reduce(rx.ReduceOp.MEAN, per_replica, axis=None)
# replicax migrate: ok
strategy.reduce(rx.ReduceOp.MEAN, per_replica, axis=0)
# replicax migrate: tf.while_loop: a loop of JAX takes one value, and its shapes stay the same. Write
#   jax.lax.while_loop(cond, body, init) or keras.ops.while_loop; or a Python loop of known length.
tf.while_loop(lambda i: i < 3, lambda i: i + 1, [0])
# replicax migrate: the table has no row for tf.no_such_name.
tf.no_such_name(1)

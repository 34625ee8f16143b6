"""One worker of TensorFlow in ``multi_worker.py``; run with a Python that has TensorFlow."""

import json
import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "tensorflow"

import numpy as np
import tensorflow as tf

import fit_process
import peer_process
import worker_timing


def build(task, index, addresses, **task_options):
    """Answers the commands of the benchmark; see ``worker_replicax.py``."""
    own = {"type": "worker", "index": index}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": addresses}, "task": own})
    ring = tf.distribute.experimental.CommunicationImplementation.RING
    options = tf.distribute.experimental.CommunicationOptions(implementation=ring)
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=options)
    assert strategy.num_replicas_in_sync == len(addresses)
    assert tf.config.experimental.get_synchronous_execution()  # a call returns when it has been done
    return TASKS[task](strategy, **task_options)


def all_reduce(strategy):
    """One call of a ``tf.function`` with one all-reduce."""

    def make(size):
        value = tf.ones(size // 4)

        def step():
            return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, value)

        return tf.function(lambda: strategy.run(step))

    return worker_timing.of_sizes(make, np.asarray, strategy.num_replicas_in_sync)


def steps(strategy, model, rows):
    """One training step in a ``tf.function``, on a fixed batch."""
    with strategy.scope():
        network = fit_process.compiled_model(model, 1)
        network.optimizer.build(network.trainable_variables)
    loss_object = tf.keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    dataset = tf.data.Dataset.from_tensor_slices(fit_process.data(model, rows)).batch(rows)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def step(batch):
        features, labels = batch
        with tf.GradientTape() as tape:
            per_example = loss_object(labels, network(features, training=True))
            loss = tf.nn.compute_average_loss(per_example, global_batch_size=rows)
        gradients = tape.gradient(loss, network.trainable_variables)
        network.optimizer.apply_gradients(zip(gradients, network.trainable_variables))
        return loss

    distributed_step = tf.function(lambda: strategy.run(step, args=(batch,)))
    return worker_timing.of_steps(distributed_step, float)


TASKS = {"all_reduce": all_reduce, "steps": steps}


if __name__ == "__main__":
    peer_process.answer(build)

"""Parameter servers compared with TensorFlow's: one worker, two parameter servers, the same steps on the same data."""

import socket
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy

NUM_STEPS = 12
pytestmark = pytest.mark.timeout(180)

# In a separate process, because TensorFlow's servers cannot be stopped.
TENSORFLOW = """
import os, sys
import numpy as np
import tensorflow as tf

data, num_steps, ports = np.load(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
addresses = [f"localhost:{port}" for port in ports]
spec = tf.train.ClusterSpec({"worker": addresses[:1], "ps": addresses[1:]})
servers = [tf.distribute.Server(spec, job, index) for job, index in (("worker", 0), ("ps", 0), ("ps", 1))]
strategy = tf.distribute.ParameterServerStrategy(
    tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc"),
    variable_partitioner=tf.distribute.experimental.partitioners.FixedShardsPartitioner(2),
)
coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
with strategy.scope():
    weight, table = tf.Variable(data["weight"]), tf.Variable(data["table"])
    squares = tf.Variable(np.full_like(data["table"], 0.1))
    mean = tf.Variable(np.zeros(3, np.float32))

@tf.function
def step(iterator):
    def replica_fn(x, y, ids):
        with tf.GradientTape() as tape:
            rows = tf.reduce_mean(tf.nn.embedding_lookup(table, ids), 1)
            errors = tf.matmul(x, tf.concat(list(weight.variables), 0)) + rows - y
            loss = tf.nn.compute_average_loss(tf.reduce_sum(errors ** 2, -1))
        of_weight, of_table = tape.gradient(loss, [weight.variables, table.variables])
        for v, g in zip(weight.variables, of_weight):
            v.assign_sub(0.1 * tf.convert_to_tensor(g))
        for v, s, g in zip(table.variables, squares.variables, of_table):
            g = tf.convert_to_tensor(g)
            s.assign_add(g * g)
            v.assign_sub(0.5 * g / tf.sqrt(s + 1e-7))
        mean.assign(mean * 0.9 + tf.reduce_mean(y, 0) * 0.1)
        return loss
    losses = strategy.run(replica_fn, args=next(iterator))
    return strategy.reduce(tf.distribute.ReduceOp.SUM, losses, axis=None)

dataset = lambda: tf.data.Dataset.from_tensor_slices((data["x"], data["y"], data["ids"])).batch(8).repeat()
iterator = iter(coordinator.create_per_worker_dataset(dataset))
losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(num_steps)]
coordinator.join()
whole = lambda v: tf.concat(list(v.variables), 0).numpy()
np.savez(
    sys.argv[1] + ".found.npz",
    losses=coordinator.fetch(losses), weight=whole(weight), table=whole(table), squares=whole(squares), mean=mean.numpy(),
)
os._exit(0)
"""


def made():
    random = np.random.RandomState(0)
    return {
        "x": random.randn(40, 7).astype(np.float32),
        "y": random.randn(40, 3).astype(np.float32),
        "ids": random.randint(0, 11, (40, 5)).astype(np.int32),
        "weight": random.randn(7, 3).astype(np.float32),
        "table": random.randn(11, 3).astype(np.float32),
    }


def with_replicax(data):
    """The listing above, with names changed by docs/migrating_from_tensorflow.md."""
    partitioner = rx.experimental.partitioners.FixedShardsPartitioner(2)
    with (
        in_memory_strategy(workers=1, ps=2, partitioner=partitioner) as strategy,
        rx.coordinator.ClusterCoordinator(strategy) as coordinator,
    ):
        with strategy.scope():
            weight, table = rx.Variable(data["weight"]), rx.Variable(data["table"])
            squares = rx.Variable(np.full_like(data["table"], 0.1))
            mean = rx.Variable(np.zeros(3, np.float32))

        @rx.function
        def step(iterator):
            def replica_fn(x, y, ids):
                with rx.GradientTape() as tape:
                    rows = jnp.mean(rx.nn.embedding_lookup(table, ids), 1)
                    errors = jnp.matmul(x, weight) + rows - y
                    loss = rx.nn.compute_average_loss(jnp.sum(errors**2, -1))
                of_weight, of_table = tape.gradient(loss, [weight, table])
                weight.assign_sub(0.1 * of_weight)
                squares.assign_add(of_table * of_table)
                table.assign_sub(0.5 * of_table / jnp.sqrt(squares + 1e-7))
                mean.assign(mean * 0.9 + jnp.mean(y, 0) * 0.1)
                return loss

            losses = strategy.run(replica_fn, args=next(iterator))
            return strategy.reduce(rx.ReduceOp.SUM, losses, axis=None)

        def dataset():
            return rx.data.from_arrays((data["x"], data["y"], data["ids"])).batch(8).repeat()

        iterator = iter(coordinator.create_per_worker_dataset(dataset))
        losses = [coordinator.schedule(step, args=(iterator,)) for _ in range(NUM_STEPS)]
        coordinator.join()
        variables = {"weight": weight, "table": table, "squares": squares, "mean": mean}
        return {"losses": coordinator.fetch(losses)} | {n: v.numpy() for n, v in variables.items()}


def free_ports(count):
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    try:
        return [str(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def test_one_worker_equals_tensorflow(tmp_path):
    data, path = made(), str(tmp_path / "data.npz")
    np.savez(path, **data)
    done = subprocess.run(
        [sys.executable, "-c", TENSORFLOW, path, str(NUM_STEPS), *free_ports(3)],
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    expected, found = np.load(f"{path}.found.npz"), with_replicax(data)
    assert expected["losses"][-1] < 0.5 * expected["losses"][0]
    for name in found:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=5e-6, err_msg=name)

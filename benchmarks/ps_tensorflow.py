"""The coordinator of TensorFlow's cluster in ``parameter_server.py``, and its servers; needs TensorFlow.

It uses raw variables, a ``GradientTape`` and raw operators, which are the fastest with TensorFlow.
"""

from __future__ import annotations

import os

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ["GRPC_FAIL_FAST"] = "use_caller"

import atexit
import contextlib
import json
import socket
import subprocess
import sys
import tempfile
import threading

import numpy as np
import tensorflow as tf

import peer_process
import ps_sizes
import ps_timing


def build(task, **options):
    """Starts a cluster, and returns a function that runs one of ``TASKS``."""
    addresses = _free_addresses(ps_sizes.NUM_WORKERS + 2)
    cluster = {"chief": addresses[:1], "ps": addresses[1:2], "worker": addresses[2:]}
    names = [("ps", 0), *(("worker", index) for index in range(ps_sizes.NUM_WORKERS))]
    servers = {name: _start(cluster, *name) for name in names}
    os.environ["TF_CONFIG"] = json.dumps({"cluster": cluster, "task": {"type": "chief", "index": 0}})
    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    if task == "memory":
        return memory(strategy, coordinator, servers["ps", 0].pid, **options)
    pids = {"coordinator": os.getpid(), "ps": servers["ps", 0].pid}
    pids |= {f"worker {i}": servers["worker", i].pid for i in range(ps_sizes.NUM_WORKERS)}
    return ps_timing.with_cpu_time(TASKS[task](strategy, coordinator, **options), pids)


def closures(strategy, coordinator):
    return ps_timing.of_scheduled(coordinator, _nothing)


def fetch(strategy, coordinator):
    return ps_timing.of_fetches(coordinator, _nothing)


@tf.function
def _nothing():
    return tf.constant(1.0)


def mlp(strategy, coordinator):
    weights, (x, labels) = ps_sizes.mlp()
    with strategy.scope():
        variables = [tf.Variable(w) for w in weights]

    @tf.function
    def step():
        with tf.GradientTape() as tape:
            w1, b1, w2, b2 = variables
            logits = tf.nn.relu(tf.constant(x) @ w1 + b1) @ w2 + b2
            loss = tf.reduce_mean(
                tf.nn.sparse_softmax_cross_entropy_with_logits(labels=tf.constant(labels), logits=logits)
            )
        for variable, gradient in zip(variables, tape.gradient(loss, variables)):
            variable.assign_sub(ps_sizes.RATE * gradient)
        return loss

    return ps_timing.of_scheduled(coordinator, step, read=float)


def transfer(strategy, coordinator):
    with strategy.scope():
        variable = tf.Variable(tf.zeros(ps_sizes.LARGE))

    @tf.function
    def ones():  # each time the same tensor: there are no per-worker values
        return tf.data.Dataset.from_tensors(tf.ones(ps_sizes.LARGE)).repeat()

    change = iter(coordinator.create_per_worker_dataset(ones))

    @tf.function
    def push(change):
        variable.assign_sub(ps_sizes.RATE * next(change))
        return tf.constant(1.0)

    @tf.function
    def pull():
        with tf.device("/job:worker"):
            return tf.identity(variable.read_value())[-1]

    def once(fn, *args):
        return float(coordinator.schedule(fn, args=args).fetch())

    values = [np.full(ps_sizes.LARGE, i, np.float32) for i in range(2)]
    return ps_timing.of_transfers(
        {
            "worker push": lambda n: once(push, change),
            "worker pull": lambda n: once(pull),
            # A tensor that was sent before would not be sent again.
            "coordinator push": lambda n: variable.assign(tf.constant(values[n % 2])),
            "coordinator pull": lambda n: variable.read_value().numpy(),
        }
    )


def embedding(strategy, coordinator, optimizer):
    rows, columns = ps_sizes.TABLE
    with strategy.scope():
        table = tf.Variable(tf.random.uniform((rows, columns), -0.05, 0.05))
        sums = tf.Variable(tf.fill((rows, columns), 0.1))
    ids = ps_sizes.ids()

    def update(gradient):
        if optimizer == "SGD":
            table.scatter_sub(tf.IndexedSlices(ps_sizes.RATE * gradient.values, gradient.indices))
            return
        unique, positions = tf.unique(gradient.indices)
        summed = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(unique))
        tf.raw_ops.ResourceSparseApplyAdagradV2(
            var=table.handle,
            accum=sums.handle,
            lr=ps_sizes.RATE,
            epsilon=1e-7,
            grad=summed,
            indices=unique,
        )

    @tf.function
    def step(iterator):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(tf.square(tf.nn.embedding_lookup(table, next(iterator))))
        update(tape.gradient(loss, table))
        return loss

    @tf.function
    def dataset():
        return tf.data.Dataset.from_tensor_slices(ids).repeat().prefetch(2)

    iterator = iter(coordinator.create_per_worker_dataset(dataset))
    return ps_timing.of_scheduled(coordinator, step, (iterator,), read=float)


def memory(strategy, coordinator, pid, tables, rows, columns):
    """Like replicax's function, but the existing process restores."""
    phases = ps_timing.MemoryPhases(lambda: pid)
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)

    def make():
        with strategy.scope():
            shape = (rows, columns)
            values = [tf.Variable(lambda: tf.random.uniform(shape, -0.05, 0.05)) for _ in range(tables)]
            bindings = [[tf.Variable(lambda: tf.zeros(shape)) for _ in range(2)] for _ in values]
        ids = tf.range(64)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                loss = sum(tf.reduce_sum(tf.square(tf.nn.embedding_lookup(v, ids))) for v in values)
            for variable, (first, second), gradient in zip(values, bindings, tape.gradient(loss, values)):
                first.scatter_add(tf.IndexedSlices(0.1 * gradient.values, gradient.indices))
                squares = tf.square(gradient.values)
                second.scatter_add(tf.IndexedSlices(0.001 * squares, gradient.indices))
                moved = tf.gather(first, ids) / (tf.sqrt(tf.gather(second, ids)) + 1e-7)
                variable.scatter_sub(tf.IndexedSlices(0.001 * moved, gradient.indices))
            return loss

        return step, tf.train.Checkpoint(values=values, bindings=bindings)

    def run(count):
        with phases.of("empty"):
            coordinator.schedule(_nothing).fetch()
        with phases.of("creating"):
            step, checkpoint = make()
            coordinator.schedule(step).fetch()
        with phases.of("steps"):
            for _ in range(count):
                coordinator.schedule(step)
            coordinator.join()
        path = checkpoint.write(os.path.join(folder.name, "checkpoint"))
        with phases.of("restoring"):
            checkpoint.read(path).assert_consumed()
        return phases.found

    return run


TASKS = {
    "closures": closures,
    "fetch": fetch,
    "mlp": mlp,
    "transfer": transfer,
    "embedding": embedding,
}


# --- servers ------------------------------------------------------------------------------------------


def _free_addresses(count):
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(count)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [f"localhost:{bound.getsockname()[1]}" for bound in sockets]


def _start(cluster, job, index):
    """A server, which ends with this process."""
    command = [sys.executable, __file__, json.dumps(cluster), job, str(index)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)

    def end():
        process.kill()
        process.wait()

    atexit.register(end)
    return process


def _serve(cluster, job, index):
    def end_with_parent():
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=end_with_parent, daemon=True).start()
    config = tf.compat.v1.ConfigProto()
    config.inter_op_parallelism_threads = max(4, os.cpu_count() or 1)  # fewer can wait for each other
    spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(
        spec, job_name=job, task_index=int(index), protocol="grpc", config=config, start=True
    )
    server.join()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        _serve(*sys.argv[1:])
    else:
        peer_process.answer(build)

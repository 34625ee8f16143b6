"""The coordinator of replicax's cluster in ``parameter_server.py``; workers and ps run ``replicax server``."""

from __future__ import annotations

import os
import sys

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("PJRT_NPROC", None)  # of who runs all benchmarks, for its virtual devices

import atexit
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np

import peer_process
import ps_sizes
import ps_timing
import replicax as rx
from ps_timing import Run


def build(task: str, replication: int | None = None, tls: bool = False, **options: Any) -> Run:
    """Starts a cluster, with two parameter servers if a number of copies is given, and returns a function
    that runs one of ``TASKS``.

    Args:
      tls: All connections use mutual TLS.
    """
    folder = tempfile.TemporaryDirectory()
    atexit.register(folder.cleanup)
    if tls:
        os.environ.update(_certificates(Path(folder.name)))
    arguments = ["--snapshot-dir", folder.name, "--snapshot-interval", "3600"] if task == "memory" else []
    cluster = rx.testing.LocalCluster(
        ps_sizes.NUM_WORKERS,
        chief=True,
        num_ps=1 if replication is None else 2,
        server_arguments=arguments,
        timeout_s=ps_sizes.LIMIT_S,
    )
    atexit.register(cluster.close)
    cluster.start_servers()
    os.environ.update(cluster.environment_of("chief", 0))
    if task == "memory":
        return memory(cluster, Path(folder.name), **options)
    strategy = rx.ParameterServerStrategy(
        rx.cluster_resolver.TFConfigClusterResolver(), replication=replication or 1
    )
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    pids = {"coordinator": os.getpid()}
    pids |= {f"{job} {i}": task.pid for (job, i), task in cluster.tasks.items()}
    return ps_timing.with_cpu_time(TASKS[task](strategy, coordinator, **options), pids)


def _certificates(folder: Path) -> dict[str, str]:
    """The environment of tasks that authenticate with certificates; the files are in ``folder``."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from certificates import files_of_ca

    files = files_of_ca(folder, "task")
    return {f"REPLICAX_TLS_{name.removesuffix('_file').upper()}": path for name, path in files.items()}


def closures(strategy: Any, coordinator: Any) -> Run:
    """Empty functions."""
    return ps_timing.of_scheduled(coordinator, _nothing)


def fetch(strategy: Any, coordinator: Any) -> Run:
    """Empty functions; each result is fetched."""
    return ps_timing.of_fetches(coordinator, _nothing)


def _nothing() -> Any:
    return jnp.float32(1)


def mlp(strategy: Any, coordinator: Any) -> Run:
    """A step with variables, gradients, and an assignment of each."""
    weights, batch = ps_sizes.mlp()
    with strategy.scope():
        variables = [rx.Variable(w) for w in weights]

    def step(batch: Any) -> Any:
        x, labels = batch
        with rx.GradientTape() as tape:
            w1, b1, w2, b2 = (v.value for v in variables)
            logits = jax.nn.relu(x @ w1 + b1) @ w2 + b2
            picked = jnp.take_along_axis(jax.nn.log_softmax(logits), labels[:, None], axis=1)
            loss = -jnp.mean(picked)
        gradients = tape.gradient(loss, variables)
        for variable, gradient in zip(variables, gradients, strict=True):
            variable.assign_sub(ps_sizes.RATE * gradient)
        return loss

    return ps_timing.of_scheduled(coordinator, step, (_at_workers(coordinator, batch),), read=float)


def mlp_keras(strategy: Any, coordinator: Any) -> Run:
    """The same step with a Keras model and optimizer."""
    _, batch = ps_sizes.mlp()
    with strategy.scope():
        inputs, hidden, outputs = ps_sizes.MLP
        layers = [keras.layers.Dense(hidden, activation="relu"), keras.layers.Dense(outputs)]
        model = keras.Sequential([keras.Input((inputs,)), *layers])
        optimizer = keras.optimizers.SGD(ps_sizes.RATE)
        optimizer.build(model.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True)

    def step(batch: Any) -> Any:
        x, labels = batch
        with rx.GradientTape() as tape:
            loss = loss_object(labels, model(x, training=True))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return ps_timing.of_scheduled(coordinator, step, (_at_workers(coordinator, batch),), read=float)


def push(strategy: Any, coordinator: Any) -> Run:
    """Pushes an MLP's precomputed gradients to Adam on the servers; the next function pulls the new values."""
    weights, _ = ps_sizes.mlp()
    with strategy.scope():
        variables = [keras.Variable(w) for w in weights]
        optimizer = keras.optimizers.Adam(ps_sizes.RATE)
        optimizer.build(variables)

    def step(gradients: Any) -> Any:
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return sum(jnp.sum(variable.value) for variable in variables)

    return ps_timing.of_scheduled(coordinator, step, (_at_workers(coordinator, weights),), read=float)


def _at_workers(coordinator: Any, batch: Any) -> Any:
    """A batch that each worker has ready, as TensorFlow's workers have it in their graph."""
    return coordinator.create_per_worker_value(lambda: batch)


def transfer(strategy: Any, coordinator: Any) -> Run:
    """A worker pulls a full variable after it has changed, and assigns as many bytes."""
    size = ps_sizes.LARGE  # the module is not there for a worker
    with strategy.scope():
        variable = rx.Variable(np.zeros(size, np.float32))
    change = coordinator.create_per_worker_value(lambda: np.ones(size, np.float32))

    def push(change: Any) -> Any:
        variable.assign_sub(ps_sizes.RATE * change)
        return jnp.float32(1)

    def pull() -> Any:
        return variable.value[-1]

    def once(fn: Callable[..., Any], *args: Any) -> float:
        return float(coordinator.schedule(fn, args=args).fetch())

    values = [np.full(size, i, np.float32) for i in range(2)]
    return ps_timing.of_transfers(
        {
            "worker push": lambda n: once(push, change),
            "worker pull": lambda n: once(pull),
            "coordinator push": lambda n: variable.assign(values[n % 2]),
            "coordinator pull": lambda n: np.asarray(variable.value),
        }
    )


def embedding(strategy: Any, coordinator: Any, optimizer: str) -> Run:
    """Pulls rows of a Keras ``Embedding``, and updates them with a Keras optimizer."""
    rows, columns = ps_sizes.TABLE
    with strategy.scope():
        layer = keras.layers.Embedding(rows, columns)
        layer.build(())
        rule = {"SGD": keras.optimizers.SGD, "Adagrad": keras.optimizers.Adagrad}[optimizer](ps_sizes.RATE)
        rule.build(layer.trainable_variables)
    ids = ps_sizes.ids()
    dataset = coordinator.create_per_worker_dataset(lambda: rx.data.from_arrays(ids).repeat())
    iterator = iter(dataset)

    def step(iterator: Any) -> Any:
        with rx.GradientTape() as tape:
            loss = jnp.sum(jnp.square(layer(next(iterator))))
        gradients = tape.gradient(loss, layer.trainable_variables)
        rule.apply_gradients(zip(gradients, layer.trainable_variables, strict=True))
        return loss

    return ps_timing.of_scheduled(coordinator, step, (iterator,), read=float)


def memory(cluster: Any, folder: Path, tables: int, rows: int, columns: int) -> Run:
    """Memory of the ps while tables with Adam's bindings are made, used, written to a snapshot, and restored by
    a new process."""
    strategy = rx.ParameterServerStrategy(rx.cluster_resolver.TFConfigClusterResolver())
    coordinator = rx.coordinator.ClusterCoordinator(strategy)
    phases = ps_timing.MemoryPhases(lambda: cluster.tasks["ps", 0].pid)

    def make() -> Any:
        with strategy.scope():
            layers = [keras.layers.Embedding(rows, columns) for _ in range(tables)]
            for layer in layers:
                layer.build(())
            variables = [layer.embeddings for layer in layers]
            rule = keras.optimizers.Adam()
            rule.build(variables)

        def step() -> Any:
            with rx.GradientTape() as tape:
                loss = sum(jnp.sum(jnp.square(layer(jnp.arange(64)))) for layer in layers)
            gradients = tape.gradient(loss, variables)
            rule.apply_gradients(zip(gradients, variables, strict=True))
            return loss

        return step

    def run(count: int) -> dict[str, Any]:
        with phases.of("empty"):
            coordinator.schedule(_nothing).fetch()
        with phases.of("creating"):
            step = make()
            coordinator.schedule(step).fetch()
        with phases.of("snapshot"):
            for _ in _until_written(folder):
                coordinator.schedule(step).fetch()
        with phases.of("steps"):
            for _ in range(count):
                coordinator.schedule(step)
            coordinator.join()
        ps = cluster.tasks["ps", 0]
        ps.terminate()
        ps.wait()
        cluster.restart("ps", 0)
        cluster.wait_for_servers()
        with phases.of("restoring", is_new=True):
            pass
        return phases.found

    return run


def _until_written(folder: Path) -> Iterator[None]:
    """Waits until a ps has written a snapshot of new variables: until the file exists and no longer grows."""
    before, until = -1, time.monotonic() + ps_sizes.LIMIT_S
    while time.monotonic() < until:
        looks_again = time.monotonic() + 3.0
        while time.monotonic() < looks_again:
            yield
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
        if size == before > 0:
            return
        before = size


TASKS = {
    "closures": closures,
    "fetch": fetch,
    "mlp": mlp,
    "mlp_keras": mlp_keras,
    "push": push,
    "transfer": transfer,
    "embedding": embedding,
}


if __name__ == "__main__":
    peer_process.answer(build)

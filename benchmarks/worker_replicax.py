"""One worker of replicax, or of JAX by hand, in ``multi_worker.py``."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import fit_process
import models
import peer_process
import replicax as rx
import worker_timing
from worker_timing import Run

NUM_FIT_STEPS = 65


def build(
    contestant: str,
    task: str,
    index: int,
    addresses: Sequence[str],
    devices_per_worker: int = 1,
    fault_tolerance: bool = False,
    implementation: str = "AUTO",
    **task_options: Any,
) -> Run:
    """Answers the commands of the benchmark.

    Args:
      contestant: A key of ``TASKS``.
      task: A key of its tasks.
      index: The index of this worker.
      addresses: The addresses of all workers.
      devices_per_worker: The number of virtual devices of each worker.
      implementation: That of ``CommunicationOptions``; RING is JAX's own engine, with gloo.
      fault_tolerance: True if workers continue when others die: each has only its own devices then.
      **task_options: The arguments of the task.
    """
    os.environ.pop("PJRT_NPROC", None)  # what each chooses by itself
    if contestant == "replicax":
        if devices_per_worker > 1:
            rx.config.set_local_devices(devices_per_worker)
        own = {"type": "worker", "index": index}
        os.environ["TF_CONFIG"] = json.dumps({"cluster": {"worker": list(addresses)}, "task": own})
        options = rx.CommunicationOptions(implementation=implementation)
        more = {"fault_tolerance": True} if fault_tolerance else {}
        place: Any = rx.MultiWorkerMirroredStrategy(communication_options=options, **more)
    else:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.distributed.initialize(addresses[0], len(addresses), index)
        place = jax.sharding.Mesh(np.array(jax.devices()), ("replica",))
    assert len(jax.devices()) == devices_per_worker * (1 if fault_tolerance else len(addresses))
    return TASKS[contestant][task](place, **task_options)


# --- replicax -------------------------------------------------------------------------------------------


def all_reduce(strategy: rx.Strategy) -> Run:
    """One call of ``run`` with one all-reduce, and the wait for its result."""

    def step(x: Any) -> Any:
        return rx.get_replica_context().all_reduce(rx.ReduceOp.SUM, x)

    def make(size: int) -> Callable[[], Any]:
        value = strategy.experimental_distribute_values_from_function(lambda context: ones(size))

        return lambda: jax.block_until_ready(strategy.run(step, args=(value,)))

    return worker_timing.of_sizes(
        make,
        lambda total: np.asarray(strategy.experimental_local_results(total)[0]),
        strategy.num_replicas_in_sync,
    )


def reduce(strategy: rx.Strategy) -> Run:
    """One ``strategy.reduce`` outside of programs, and the wait for its result."""
    return _reductions(strategy, lambda value: strategy.reduce(rx.ReduceOp.SUM, value, axis=None))


def reduce_in_function(strategy: rx.Strategy) -> Run:
    """The same in ``rx.function``."""
    total = rx.function(lambda value: strategy.reduce(rx.ReduceOp.SUM, value, axis=None))
    return _reductions(strategy, total)


def _reductions(strategy: rx.Strategy, total: Callable[[Any], Any]) -> Run:
    def make(size: int) -> Callable[[], Any]:
        value = strategy.experimental_distribute_values_from_function(lambda context: ones(size))
        return lambda: jax.block_until_ready(total(value))

    return worker_timing.of_sizes(make, np.asarray, strategy.num_replicas_in_sync)


def steps(strategy: rx.Strategy, model: str, rows: int) -> Run:
    """One training step through ``run``, on a fixed batch."""
    import keras

    with strategy.scope():
        network = fit_process.compiled_model(model, 1)
        network.optimizer.build(network.trainable_variables)
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    dataset = rx.data.from_arrays(fit_process.data(model, rows)).batch(rows)
    batch = next(iter(strategy.experimental_distribute_dataset(dataset)))

    def step(batch: Any) -> Any:
        features, labels = batch
        with rx.GradientTape() as tape:
            per_example = loss_object(labels, network(features, training=True))
            loss = rx.nn.compute_average_loss(per_example, global_batch_size=rows)
        gradients = tape.gradient(loss, network.trainable_variables)
        network.optimizer.apply_gradients(zip(gradients, network.trainable_variables, strict=True))
        return loss

    return worker_timing.of_steps(
        lambda: jax.block_until_ready(strategy.run(step, args=(batch,))),
        lambda loss: float(strategy.experimental_local_results(loss)[0]),
    )


def fit(strategy: rx.Strategy, model: str, rows: int) -> Run:
    """The steps of ``fit``, with its input and its loop: from the end of one step to that of the next."""
    import keras

    with strategy.scope():
        network = fit_process.compiled_model(model, 1)
    features, labels = fit_process.data(model, NUM_FIT_STEPS * rows)

    class Ends(keras.callbacks.Callback):
        def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
            self.times: list[float] = []

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.times.append(time.perf_counter())

    def run(count: int) -> list[float]:
        del count
        ends = Ends()
        network.fit(features, labels, batch_size=rows, shuffle=False, verbose=0, callbacks=[ends])
        return np.diff(ends.times).tolist()

    return run


def fit_whole(strategy: rx.Strategy, model: str, rows: int) -> Run:
    """The same in the global view, where the partitioner splits the step: no step is split by rows."""
    from replicax._src.lowering import global_view

    def refuse(*_args: Any) -> None:
        raise global_view.NotByRowsError("a benchmark asks for the global view")

    global_view.RowsPlan = refuse  # type: ignore[assignment,misc]
    return fit(strategy, model, rows)


# --- JAX by hand ----------------------------------------------------------------------------------------


def all_reduce_by_hand(mesh: jax.sharding.Mesh) -> Run:
    """One call of ``jit(shard_map(psum))``, and the wait for its result."""
    row, whole = jax.sharding.PartitionSpec("replica"), jax.sharding.PartitionSpec()
    total = jax.jit(
        jax.shard_map(lambda x: jax.lax.psum(x[0], "replica"), mesh=mesh, in_specs=row, out_specs=whole)
    )

    def make(size: int) -> Callable[[], Any]:
        sharding = jax.sharding.NamedSharding(mesh, row)
        value = jax.make_array_from_process_local_data(sharding, ones(size)[None])
        return lambda: jax.block_until_ready(total(value))

    return worker_timing.of_sizes(make, np.asarray, mesh.size)


def steps_by_hand(mesh: jax.sharding.Mesh, model: str, rows: int) -> Run:
    """The step of ``models.py``, with the gradients in one buffer."""
    sizes = fit_process.DENSE[model]
    row, whole = jax.sharding.PartitionSpec("replica"), jax.sharding.PartitionSpec()
    state = jax.device_put(models.initial_state(sizes), jax.sharding.NamedSharding(mesh, whole))
    batch = jax.device_put(models.data(sizes, rows), jax.sharding.NamedSharding(mesh, row))
    step = models.hand_written_step(mesh, rows, is_packed=True)

    def once() -> Any:
        nonlocal state
        state, loss = step(state, batch)
        return jax.block_until_ready(loss)

    return worker_timing.of_steps(once, lambda loss: float(loss.addressable_data(0)[0]))


def ones(size: int) -> np.ndarray:
    """As many bytes as the argument says."""
    return np.ones(size // 4, np.float32)


TASKS = {
    "replicax": {
        "all_reduce": all_reduce,
        "reduce": reduce,
        "reduce in function": reduce_in_function,
        "steps": steps,
        "fit": fit,
        "fit whole": fit_whole,
    },
    "by hand": {"all_reduce": all_reduce_by_hand, "steps": steps_by_hand},
}


if __name__ == "__main__":
    peer_process.answer(build)

"""One contestant of ``compiling.py``: a large Keras model and the function that runs its steps, in a separate
process."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
os.environ["KERAS_BACKEND"] = "jax"

import numpy as np

import fit_process
import peer_process

BY_HAND, RUN = "by hand", "strategy.run"
FIT, ON_BATCH = "replicax, fit", "replicax, train_on_batch"
DATA_PARALLEL, DATA_PARALLEL_ON_BATCH = "DataParallel, fit", "DataParallel, train_on_batch"
OWN_THREADS = "DataParallel, fit, JAX's threads"
ROWS, LENGTH, VOCABULARY, WIDTH, CLASSES = 8, 32, 128, 64, 10


def build(contestant: str, model: str, layers: int) -> Any:
    """Answers the commands of the benchmark.

    Args:
      contestant: A key of ``CONTESTANTS``.
      model: A key of ``MODELS``.
      layers: The number of layers, if the model may have any number.
    """
    is_of_keras = contestant in (DATA_PARALLEL, DATA_PARALLEL_ON_BATCH, OWN_THREADS)
    if contestant == OWN_THREADS:
        fit_process.CPU_POOL_THREADS = str(os.cpu_count())
    scope = fit_process.keras_data_parallel() if is_of_keras else fit_process.replicax_mirrored()
    return _Contestant(CONTESTANTS[contestant], MODELS[model], layers, scope)


class _Contestant:
    """Runs the first step, then others, and counts what XLA has compiled."""

    def __init__(self, make: Callable[..., Any], model_of: Callable[..., Any], layers: int, scope: Any):
        import keras

        keras.utils.set_random_seed(0)
        with scope:
            model, features, labels = model_of(layers)
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            model.compile(keras.optimizers.Adam(1e-3), loss)
            model.optimizer.build(model.trainable_variables)
            self._steps = make(model, features, labels)

    def __call__(self, count: int, *, counts_kernels: bool = False) -> Any:
        if counts_kernels:
            return num_kernels()
        start, processor = time.perf_counter(), time.process_time()
        measured = self._steps(count)
        seconds = time.perf_counter() - start
        return [seconds if measured is None else measured, time.process_time() - processor]


def num_kernels() -> int:
    """Returns the number of different kernels in the largest program of this process."""
    import jax

    programs = [
        program.hlo_modules()[0].to_string() for program in jax.devices()[0].client.live_executables()
    ]
    bodies = re.findall(r"^%fused_computation\S* .*?^}", max(programs, key=len), re.MULTILINE | re.DOTALL)
    names = r"%[\w.-]+|param_[\d.]+|, metadata={[^}]*}|/\*.*?\*/"
    return len({re.sub(names, "", body) for body in bodies})


# --- models ---------------------------------------------------------------------------------------------


def gpt(layers: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """A small transformer with 16 variables in each layer, and one batch."""
    import keras
    from keras import layers as kl

    tokens = keras.Input((LENGTH,), dtype="int32")
    x = kl.Embedding(VOCABULARY, WIDTH)(tokens)
    for _ in range(layers):
        y = kl.LayerNormalization()(x)
        x = x + kl.MultiHeadAttention(4, WIDTH // 4)(y, y, use_causal_mask=True)
        y = kl.LayerNormalization()(x)
        x = x + kl.Dense(WIDTH)(kl.Dense(4 * WIDTH, activation="gelu")(y))
    model = keras.Model(tokens, kl.Dense(VOCABULARY)(kl.LayerNormalization()(x)))
    rng = np.random.default_rng(0)
    text = rng.integers(0, VOCABULARY, (ROWS, LENGTH + 1)).astype(np.int32)
    return model, text[:, :-1], text[:, 1:]


def resnet(layers: int) -> tuple[Any, np.ndarray, np.ndarray]:
    """ResNet50 for small pictures, and one batch."""
    del layers
    import keras

    model = keras.applications.ResNet50(
        weights=None, input_shape=(32, 32, 3), classes=CLASSES, classifier_activation=None
    )
    rng = np.random.default_rng(0)
    pictures = rng.normal(size=(ROWS, 32, 32, 3)).astype(np.float32)
    return model, pictures, rng.integers(0, CLASSES, ROWS).astype(np.int32)


MODELS = {"GPT": gpt, "ResNet50": resnet}

# --- what runs the steps --------------------------------------------------------------------------------


def by_hand(model: Any, features: np.ndarray, labels: np.ndarray) -> Any:
    """Keras's stateless functions in ``jax.jit(jax.shard_map(...))``."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    whole, row = PartitionSpec(), PartitionSpec("replica")
    optimizer, rows = model.optimizer, features.size // features[0].size

    def loss_of(trainable: Any, others: Any, x: Any, y: Any) -> Any:
        logits, others = model.stateless_call(trainable, others, x, training=True)
        picked = jax.numpy.take_along_axis(jax.nn.log_softmax(logits), y[..., None], axis=-1)
        return -picked.mean() * len(x) / rows, others

    def step(state: Any, batch: Any) -> Any:
        trainable, others, bindings = state
        of_state = jax.value_and_grad(loss_of, has_aux=True)
        (loss, others), gradients = of_state(trainable, others, *batch)
        gradients, loss = jax.lax.psum((gradients, loss), "replica")
        others = jax.lax.pmean(others, "replica") if others else others
        trainable, bindings = optimizer.stateless_apply(bindings, gradients, trainable)
        return (trainable, others, bindings), loss

    placed = jax.shard_map(step, mesh=mesh, in_specs=(whole, row), out_specs=(whole, whole), check_vma=False)
    compiled = jax.jit(placed, donate_argnums=0)
    lists = model.trainable_variables, model.non_trainable_variables, optimizer.variables
    arrays = [[np.asarray(v.value) for v in some] for some in lists]
    state = jax.device_put(arrays, NamedSharding(mesh, whole))
    batch = jax.device_put((features, labels), NamedSharding(mesh, row))

    def run(count: int) -> None:
        nonlocal state
        loss = None
        for _ in range(count):
            state, loss = compiled(tuple(state), batch)
        jax.block_until_ready((state, loss))

    return run


def through_run(model: Any, features: np.ndarray, labels: np.ndarray) -> Any:
    """A tape and the optimizer in ``strategy.run``."""
    import jax
    import keras

    import replicax as rx

    strategy = rx.get_strategy()
    loss_object = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)
    batch = next(
        iter(
            strategy.experimental_distribute_dataset(
                rx.data.from_arrays((features, labels)).batch(len(features))
            )
        )
    )

    def step(batch: Any) -> Any:
        x, y = batch
        with rx.GradientTape() as tape:
            per_example = loss_object(y, model(x, training=True))
            loss = rx.nn.compute_average_loss(per_example, global_batch_size=len(features))
        gradients = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def run(count: int) -> None:
        loss = None
        for _ in range(count):
            loss = strategy.run(step, args=(batch,))
        jax.block_until_ready(strategy.experimental_local_results(loss))

    return run


def fit(model: Any, features: np.ndarray, labels: np.ndarray) -> Any:
    """``Model.fit``: the first step alone; the others are those of a second epoch that continues with the
    first one's iterator."""
    import keras

    ends: list[float] = []
    clock = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: ends.append(time.perf_counter()))

    def run(count: int) -> float | None:
        ends.clear()
        if count == 1:
            model.fit(features, labels, batch_size=len(features), verbose=0)
            return None
        x, y = (np.concatenate([a] * (3 * count)) for a in (features, labels))
        options: dict[str, Any] = {"steps_per_epoch": count, "epochs": 2, "verbose": 0}
        model.fit(x, y, batch_size=len(features), callbacks=[clock], **options)
        return ends[1] - ends[0]

    return run


def on_batch(model: Any, features: np.ndarray, labels: np.ndarray) -> Any:
    """``Model.train_on_batch``."""

    def run(count: int) -> None:
        for _ in range(count):
            model.train_on_batch(features, labels)

    return run


CONTESTANTS: dict[str, Callable[..., Any]] = {
    BY_HAND: by_hand,
    RUN: through_run,
    FIT: fit,
    DATA_PARALLEL: fit,
    OWN_THREADS: fit,
    ON_BATCH: on_batch,
    DATA_PARALLEL_ON_BATCH: on_batch,
}


if __name__ == "__main__":
    peer_process.answer(build)

"""One group of ``local_updates.py``: it trains beside others, or alone with a clock around each ``groups.step``.

The environment says which group it is, and its only argument is a setting in JSON.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import jax.numpy as jnp
import numpy as np

import replicax as rx

ROWS, NUM_EVALUATED = 64, 256


# --- beside others --------------------------------------------------------------------------------------


def beside_others(folder: str, widths: list[int], every: int, pause_s: float, **options: Any) -> None:
    """Trains until it is killed. Each step writes its end, the version and the loss of the group's own parameters."""
    groups = rx.experimental.LocalUpdates(every, **options)
    teacher, first, held_out = _mlp(widths, 0), _mlp(widths, 1), jax.random.key(2)

    def rows(key: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array]:
        x = jax.random.normal(key, (num_rows, widths[0]))
        return x, _outputs(teacher, x)

    x, y = rows(held_out, NUM_EVALUATED)
    velocity = jax.tree.map(jnp.zeros_like, first)

    @jax.jit
    def trained(params: Any, velocity: Any, step: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(3 + groups.index), step)
        gradients = jax.grad(_loss)(params, *rows(key, ROWS))
        velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, gradients)
        params = jax.tree.map(lambda w, v: w - 0.01 * v, params, velocity)
        return params, velocity, _loss(params, x, y)

    params = groups.attach(first)
    with open(Path(folder) / f"steps-{groups.index}", "a", buffering=1) as file:  # at once: it may be killed
        for step in itertools.count():
            params, velocity, loss = trained(params, velocity, jnp.int32(step))
            loss = float(loss)
            params = groups.step(params, tokens=ROWS)
            time.sleep(pause_s)  # the others train on the same cores
            file.write(f"{time.monotonic()} {groups.version} {loss}\n")


def _mlp(widths: list[int], seed: int) -> list[dict[str, jax.Array]]:
    draw = np.random.default_rng(seed)
    return [
        {"w": jnp.asarray(draw.normal(size=pair) * pair[0] ** -0.5, jnp.float32), "b": jnp.zeros(pair[1])}
        for pair in itertools.pairwise(widths)
    ]


def _outputs(params: Any, x: jax.Array) -> jax.Array:
    *hidden, last = params
    for layer in hidden:
        x = jnp.tanh(2 * x @ layer["w"] + layer["b"])
    return x @ last["w"] + last["b"]


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.mean((_outputs(params, x) - y) ** 2)


# --- with a clock ---------------------------------------------------------------------------------------


class Clock:
    """The seconds of calls, and of what lies between two of them.

    Attributes:
      calls: For each call: whether the group pushed in it, whether it adopted, its seconds, those of the processor in
        this thread, and the seconds of the training step after it.
    """

    def __init__(self, groups: rx.experimental.LocalUpdates):
        self.calls: list[list[Any]] = []
        self._groups, self._paused_at = groups, 0.0
        self._before = groups.statistics()

    def call(self, step: Callable[[], Any]) -> Any:
        """Times a call."""
        wall, thread = time.perf_counter(), time.thread_time()
        if self.calls:
            self.calls[-1].append(wall - self._paused_at)
        result = step()
        seconds = [time.perf_counter() - wall, time.thread_time() - thread]
        self.calls.append(seconds)
        return result

    def pause(self, seconds: float) -> None:
        """Leaves the cores to the exchange, as an accelerator does."""
        time.sleep(seconds)
        before, self._before = self._before, self._groups.statistics()  # the exchange counts after the call
        did = [self._before.get(what, 0) > before.get(what, 0) for what in ("pushes", "adoptions")]
        self.calls[-1][:0] = did
        self._paused_at = time.perf_counter()


def in_loop(width: int, every: int, num_exchanges: int, pause_s: float, **options: Any) -> None:
    """A loop whose parameters are a pytree of four matrices, which each step donates."""
    groups = rx.experimental.LocalUpdates(every, fragments=1, **options)
    clock = Clock(groups)
    draw = np.random.default_rng(0)
    params = [jnp.asarray(draw.normal(size=(width, width)) / width, jnp.float32) for _ in range(4)]
    trained = jax.jit(lambda ws: [w - 1e-3 * jnp.sin(w) for w in ws], donate_argnums=0)
    params = groups.attach(params)
    for _ in range(every * num_exchanges):
        last, params = params, jax.block_until_ready(trained(params))
        params = clock.call(lambda now=params: groups.step(now, tokens=8))
        del last  # a loop without groups drops it too, so its end is not a part of the call
        clock.pause(pause_s)
    groups.finish(300.0)
    _report(clock, 4 * width * width)


def in_fit(width: int, every: int, num_exchanges: int, pause_s: float, **options: Any) -> None:
    """``fit`` of a Keras model of four matrices."""
    import keras

    groups = rx.experimental.LocalUpdates(every, fragments=1, **options)
    clock = Clock(groups)
    layers = [keras.layers.Dense(width, use_bias=False) for _ in range(4)]
    model = keras.Sequential([keras.Input((width,)), *layers])
    model.compile(keras.optimizers.SGD(1e-4), "mse")
    callback = rx.keras.callbacks.LocalUpdatesCallback(groups)
    end_of_step = callback.on_train_batch_end

    def timed(*arguments: Any, **named: Any) -> None:
        clock.call(lambda: end_of_step(*arguments, **named))

    callback.on_train_batch_end = timed

    class Pause(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            clock.pause(pause_s)

    x = np.ones((8 * every * num_exchanges, width), np.float32)
    model.fit(x, x, batch_size=8, verbose=0, callbacks=[callback, Pause()])
    _report(clock, model.count_params())


def _report(clock: Clock, num_parameters: int) -> None:
    subtract = jax.jit(lambda a, b: a - b)
    a, b = jnp.ones(num_parameters), jnp.ones(num_parameters)
    subtractions = []
    for _ in range(20):
        start = time.perf_counter()
        jax.block_until_ready(subtract(a, b))
        subtractions.append(time.perf_counter() - start)
    megabytes = num_parameters * 4 / 1e6
    print(
        json.dumps({"megabytes": megabytes, "subtractions": subtractions[3:], "calls": clock.calls[:-1]}),
        flush=True,
    )


TASKS = {"beside others": beside_others, "loop": in_loop, "fit": in_fit}

if __name__ == "__main__":
    asked = json.loads(sys.argv[1])
    TASKS[asked.pop("task")](**asked)

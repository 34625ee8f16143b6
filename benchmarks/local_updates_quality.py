"""Runs of ``local_updates.py --only quality``: a small language model in four groups, and synchronously.

Bytes of the standard library's sources, 32 at a time; held-out are some of the files. 0.13 M parameters, 1,024 bytes per
step, AdamW, warm-up and cosine. The groups are threads of this process, and exchange through a server in its own. All
contestants of a seed begin with the same parameters, and a synchronous step has the rows of the four groups.

It reads a run from each line of its input, and writes the loss of the held-out bytes.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# One core for each process: two of them run at once.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_cpu_multi_thread_eigen=false"

import jax
import jax.numpy as jnp
import numpy as np
import optax

import replicax as rx
import workers

NUM_GROUPS, ROWS, CONTEXT = 4, 8, 32  # rows of each group in a step
WIDTH, NUM_LAYERS, NUM_HEADS = 64, 2, 4
EVERY, FRAGMENTS, AT_ONCE = 30, 3, 10  # steps in one program, and so between two boundaries
NUM_HELD_OUT, TRAIN_BYTES, TEST_BYTES = 2048, 4_850_000, 170_000
WAIT_S = 300.0
WAITING = "groups that wait"

Params = dict[str, Any]


def load_bytes() -> tuple[np.ndarray, np.ndarray]:
    """Bytes to train on, and bytes of other files to evaluate on."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    paths += sorted(Path(sysconfig.get_path("stdlib")).glob("[a-r]*/*.py"))
    random.Random(0).shuffle(paths)
    texts = [path.read_bytes() for path in paths]
    held_out, trained = b"", b""
    for text in texts:
        if len(held_out) < TEST_BYTES:
            held_out += text
        elif len(trained) < TRAIN_BYTES:
            trained += text
    return tuple(np.frombuffer(each, np.uint8) for each in (trained[:TRAIN_BYTES], held_out[:TEST_BYTES]))


def first_params(seed: int) -> Params:
    draw = np.random.default_rng(seed)

    def normal(*shape: int, scale: float | None = None) -> jax.Array:
        return jnp.asarray(draw.normal(size=shape) * (scale or shape[0] ** -0.5), jnp.float32)

    def layer() -> Params:
        return {
            "norms": jnp.ones((2, WIDTH)),
            "qkv": normal(WIDTH, 3 * WIDTH),
            "out": normal(WIDTH, WIDTH, scale=0.5 * WIDTH**-0.5),
            "up": normal(WIDTH, 4 * WIDTH),
            "down": normal(4 * WIDTH, WIDTH, scale=0.5 * (4 * WIDTH) ** -0.5),
        }

    return {
        "bytes": normal(256, WIDTH, scale=0.5),
        "places": normal(CONTEXT, WIDTH, scale=0.1),
        "layers": [layer() for _ in range(NUM_LAYERS)],
        "norm": jnp.ones(WIDTH),
        "head": normal(WIDTH, 256),
    }


def loss_of(params: Params, rows: jax.Array) -> jax.Array:
    """The mean cross entropy of the next byte. ``rows`` is int32 [rows, context + 1]."""

    def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
        return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale

    x = params["bytes"][rows[:, :-1]] + params["places"]
    num_rows = x.shape[0]
    mask = jnp.tril(jnp.ones((CONTEXT, CONTEXT), bool))
    for layer in params["layers"]:
        qkv = normalized(x, layer["norms"][0]) @ layer["qkv"]
        q, k, v = jnp.moveaxis(qkv.reshape(num_rows, CONTEXT, 3, NUM_HEADS, -1), 2, 0)
        scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * q.shape[-1] ** -0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9))
        x += jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(num_rows, CONTEXT, WIDTH) @ layer["out"]
        x += jax.nn.relu(normalized(x, layer["norms"][1]) @ layer["up"]) @ layer["down"]
    logits = normalized(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:]).mean()


def rows_at(data: jax.Array, starts: jax.Array) -> jax.Array:
    return data[starts[:, None] + jnp.arange(CONTEXT + 1)].astype(jnp.int32)


class Training:
    """The model, its data and its programs for one seed."""

    def __init__(self, seed: int):
        trained, held_out = load_bytes()
        self._data, self._seed = jnp.asarray(trained), seed
        starts = np.linspace(0, len(held_out) - CONTEXT - 2, NUM_HELD_OUT).astype(np.int32)
        self._held_out = rows_at(jnp.asarray(held_out), jnp.asarray(starts))
        self.first = first_params(seed)
        self._loss = jax.jit(loss_of)
        self._steps = jax.jit(self._trained, static_argnames="num_members", donate_argnums=1)

    def loss(self, params: Params) -> float:
        return float(self._loss(params, self._held_out))

    def first_state(self, params: Params) -> Any:
        return _optimizer(1.0, 2).init(params)

    def steps(
        self, params: Params, state: Any, first: int, rate: float, length: int, member: int, num_members: int
    ):
        """Trains ``AT_ONCE`` steps on the rows of groups, from number ``member`` on. Returns parameters and state."""
        numbers = jnp.asarray([first, length, member], jnp.int32)
        return self._steps(params, state, self._data, numbers, jnp.float32(rate), num_members=num_members)

    def _trained(self, params, state, data, numbers, rate, *, num_members):
        first, length, member = numbers
        optimizer = _optimizer(rate, length)

        def draw(step: jax.Array, group: jax.Array) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(self._seed), step), group)
            return jax.random.randint(key, (ROWS,), 0, data.shape[0] - CONTEXT - 1)

        def one(carry, step):
            params, state = carry
            starts = jax.vmap(functools.partial(draw, step))(member + jnp.arange(num_members)).reshape(-1)
            gradients = jax.grad(loss_of)(params, rows_at(data, starts))
            updates, state = optimizer.update(gradients, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(one, (params, state), first + jnp.arange(AT_ONCE))[0]


def _optimizer(rate: Any, length: Any) -> optax.GradientTransformation:
    def schedule(count: jax.Array) -> jax.Array:
        warm_up = jnp.minimum(1.0, (count + 1) / jnp.minimum(100, length / 10))
        return rate * warm_up * 0.5 * (1 + jnp.cos(jnp.pi * jnp.minimum(1.0, count / length)))

    return optax.adamw(schedule, b2=0.99, weight_decay=0.01)


def synchronous(training: Training, length: int, rate: float) -> float:
    """Trains on the rows of all groups. Returns the loss at the end."""
    params, state = training.first, training.first_state(training.first)
    for first in range(0, length, AT_ONCE):
        params, state = training.steps(params, state, first, rate, length, 0, NUM_GROUPS)
    return training.loss(params)


@contextlib.contextmanager
def server() -> Iterator[str]:
    """A syncer in a process of its own, so that its programs do not wait for the groups' steps. Yields its address."""
    (address,) = workers.free_addresses(1)
    command = [sys.executable, "-m", "replicax", "server", "--job", "ps", "--index", "0"]
    process = subprocess.Popen(
        [*command, "--cluster", json.dumps({"ps": [address]})], stdout=subprocess.DEVNULL
    )
    try:
        yield address
    finally:
        process.kill()
        process.wait()


def in_groups(training: Training, length: int, rate: float, *, waits: bool) -> float:
    """Trains in groups. Returns the loss of the outer parameters at the end."""
    results: list[Any] = [None] * NUM_GROUPS
    training.steps(
        training.first, training.first_state(training.first), 0, rate, length, 0, 1
    )  # compiles it once

    def train(groups: rx.experimental.LocalUpdates) -> None:
        params = groups.attach(training.first)
        state = training.first_state(params)
        for first in range(0, length, AT_ONCE):
            params, state = training.steps(params, state, first, rate, length, groups.index, 1)
            params = groups.step(params, tokens=AT_ONCE * ROWS, steps=AT_ONCE)
            if waits:
                params = groups.wait(WAIT_S)
        results[groups.index] = groups.finish(WAIT_S)

    with server() as address:
        os.environ["REPLICAX_SYNCERS"] = address
        made = []
        for index in range(NUM_GROUPS):
            os.environ["REPLICAX_GROUP"] = f"{index}/{NUM_GROUPS}"
            made.append(
                rx.experimental.LocalUpdates(
                    EVERY, fragments=FRAGMENTS, compression="int8", quorum=NUM_GROUPS
                )
            )
        threads = [threading.Thread(target=train, args=(each,), daemon=True) for each in made]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return training.loss(results[0])


def main() -> None:
    trainings: dict[int, Training] = {}
    for line in sys.stdin:
        asked = json.loads(line)
        seed, length, rate = asked["seed"], asked["length"], asked["rate"]
        if seed not in trainings:
            trainings[seed] = Training(seed)
        if asked["contestant"] == "synchronous":
            loss = synchronous(trainings[seed], length, rate)
        else:
            loss = in_groups(trainings[seed], length, rate, waits=asked["contestant"] == WAITING)
        print(json.dumps({"loss": loss}), flush=True)


if __name__ == "__main__":
    main()

"""Measures the time and memory of planning, by number of devices: ``python benchmarks/planning.py``, in the
environment of `make test-plan`.

On 2 free cores it takes 4 minutes. ``--unrolled``, which compiles 80 Keras layers one by one, takes longer.
``replicax plan`` makes each plan in a separate process, as users do, so the time includes the start of
Python, JAX and Keras. On a busy machine read the processor time, of all processes of a plan.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

DIGITS = Path(__file__).parents[1] / "examples" / "digits.py"
SIZES = (
    ("TPU", ("v5e:1x1", "v5e:2x4", "v5e:8x8", "v5p:8x8x8", "v5p:16x16x16")),
    ("GPU", ("h100:1x1", "h100:1x8", "h100:8x8", "h100:64x8", "h100:512x8")),
    ("virtual CPU devices", ("cpu:1", "cpu:8", "cpu:64", "cpu:512")),
)
# 70 billion parameters in 80 scanned layers, in bfloat16; functional, whole on each device, so that they fit nowhere.
SCANNED = """
import jax, jax.numpy as jnp, replicax as rx

def loss_of(weights, rows):
    def layer(h, w):
        return h + jnp.tanh(h @ w[0]) @ w[1], None
    return jnp.sum(jax.lax.scan(jax.checkpoint(layer), rows, weights)[0] ** 2)

def step(weights, rows):
    gradients = rx.get_replica_context().all_reduce("sum", jax.grad(loss_of)(weights, rows))
    return jax.tree_util.tree_map(lambda w, g: w - 1e-4 * g, weights, gradients)

strategy = rx.MirroredStrategy()
shapes = (80, 8192, 53248), (80, 53248, 8192)
weights = strategy.replicate(tuple(jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes))
rows = jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)
strategy.run(step, args=(weights, rows), options=rx.RunOptions(donate_args=(0,)))
"""
# The same as a Keras model, divided over the replicas, with Adam.
SCANNED_FIT = """
import jax, keras, numpy as np, replicax as rx
keras.config.set_dtype_policy("bfloat16")

class Layers(keras.layers.Layer):
    def build(self, shape):
        self.up = self.add_weight(shape=(80, 8192, 53248))
        self.down = self.add_weight(shape=(80, 53248, 8192))

    def call(self, rows):
        layer = jax.checkpoint(lambda h, w: (h + keras.ops.tanh(h @ w[0]) @ w[1], None))
        return jax.lax.scan(layer, rows, (self.up.value, self.down.value))[0]

strategy = rx.MirroredStrategy(shard_state="all")
with strategy.scope():
    model = keras.Sequential([keras.Input((8192,)), Layers(), keras.layers.Dense(256)])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.zeros((4096, 8192), "float32"), np.zeros(4096, "int32"), batch_size=4096)
"""
# 80 Keras layers, not scanned.
UNROLLED_FIT = """
import keras, numpy as np, replicax as rx
keras.config.set_dtype_policy("bfloat16")
strategy = rx.MirroredStrategy(shard_state="all")
with strategy.scope():
    rows = keras.Input((8192,))
    x = rows
    for _ in range(80):
        h = keras.layers.RMSNormalization()(x)
        x = x + keras.layers.Dense(8192)(keras.layers.Dense(53248, activation="tanh")(h))
    model = keras.Model(rows, keras.layers.Dense(256)(x))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
model.fit(np.zeros((4096, 8192), "float32"), np.zeros(4096, "int32"), batch_size=4096)
"""
LARGE = (
    ("scanned layers, functional", SCANNED),
    ("scanned layers in fit, shard_state='all'", SCANNED_FIT),
)
UNROLLED = (("80 layers in fit, shard_state='all'", UNROLLED_FIT),)


def main() -> None:
    """Prints a line for each plan."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=[name for name, _ in SIZES] + ["large"], help="one section")
    parser.add_argument("--unrolled", action="store_true", help="also 80 layers that are not scanned")
    options = parser.parse_args()
    chosen = options.only
    for name, topologies in SIZES:
        if chosen in (None, name):
            print(f"\nA step of the digits CNN for {name}")
            for topology in topologies:
                print(_line(topology, DIGITS), flush=True)
    if chosen in (None, "large"):
        for title, source in LARGE + UNROLLED * options.unrolled:
            print(f"\n70 billion parameters: {title}")
            with tempfile.TemporaryDirectory() as folder:
                script = Path(folder) / "large.py"
                script.write_text(source)
                for topology in ("v5p:16x16x16", "h100:512x8"):
                    print(_line(topology, script), flush=True)


def _line(topology: str, script: Path) -> str:
    options = ["--json", "--remedy-limit", "0", "--topology", topology]
    command = [sys.executable, "-m", "replicax", "plan", *options, str(script)]
    start = time.monotonic()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=_environment()
    ) as child:
        assert child.stdout is not None
        output = child.stdout.read()
        _, _, usage = os.wait4(child.pid, 0)
    took = time.monotonic() - start
    if not output:
        return f"  {topology:14} no plan"
    facts = json.loads(output)
    parts = ", ".join(f"{name} {value:5.1f}" for name, value in facts["seconds"].items())
    return (
        f"  {topology:14} {facts['num_devices']:>5,} devices  {took:6.1f} s in all ({parts})  "
        f"{usage.ru_utime + usage.ru_stime:6.1f} s of processor time  {usage.ru_maxrss / 2**20:5.2f} GiB"
    )


def _environment() -> dict[str, str]:
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}


if __name__ == "__main__":
    main()

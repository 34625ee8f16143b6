"""A small GPT that learns the pages of this repository, with its state sharded over replicas and inside of each.

Nobody writes a layout: ``rx.experimental.layouts.for_model`` makes the layout map, and ``shard_state="all"`` shards
what is left over the replicas. Without arguments the example shows a life of such a training on 8 virtual devices:

1. it trains on 4 replicas of 2 devices, without an interruption;
2. it trains again, saves, and is killed;
3. it resumes on 2 replicas of 4 devices, with the same losses;
4. it plans a step of the same script with 7 billion parameters, on 256 H100s and on a TPU v5p slice of 256 chips.

python examples/small_gpt.py
python examples/small_gpt.py train --devices-per-replica 2 --directory training   # one training
replicax plan --topology h100:32x8 --global-batch 256 examples/small_gpt.py train --size 7b --devices-per-replica 4

Plans need their compilers (in the source's folder: pip install '.[plan-gpu,plan-tpu]'), and some minutes.
"""

import argparse
import importlib.util
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

os.environ.setdefault("KERAS_BACKEND", "jax")

PAGES = pathlib.Path(__file__).parents[1] / "docs" / "explanation"
NUM_CHARACTERS, NUM_EPOCHS = 20_000, 4
PLANS = {"h100:32x8": "jax_cuda12_plugin", "v5p:4x8x8": "libtpu"}  # and what has its compiler


@dataclass(frozen=True)
class Size:
    num_tokens: int
    length: int
    width: int
    num_heads: int
    num_blocks: int
    batch_size: int


SIZES = {"small": Size(128, 32, 64, 4, 2, 64), "7b": Size(32_000, 2048, 4096, 32, 32, 32)}


def make_model(size):
    import keras

    layers = keras.layers
    keras.utils.set_random_seed(0)
    tokens = keras.Input((size.length,), dtype="int32")
    places = keras.ops.arange(size.length)
    x = layers.Embedding(size.num_tokens, size.width, name="tokens")(tokens)
    x = x + layers.Embedding(size.length, size.width, name="places")(places)
    for number in range(size.num_blocks):
        name = f"block_{number}"
        attention = layers.MultiHeadAttention(
            size.num_heads, size.width // size.num_heads, name=f"{name}_attention"
        )
        normed = layers.LayerNormalization(name=f"{name}_norm")(x)
        x = x + attention(normed, normed, use_causal_mask=True)
        hidden = layers.LayerNormalization(name=f"{name}_middle_norm")(x)
        hidden = layers.Dense(4 * size.width, activation="gelu", name=f"{name}_up")(hidden)
        x = x + layers.Dense(size.width, name=f"{name}_down")(hidden)
    x = layers.LayerNormalization(name="norm")(x)
    return keras.Model(tokens, layers.Dense(size.num_tokens, dtype="float32", name="logits")(x))


def make_data(size):
    """Rows of characters, and for each the characters that follow: whole batches."""
    import numpy as np

    pages = "\n".join(page.read_text() for page in sorted(PAGES.glob("*.md")))
    text = np.frombuffer(pages.encode("ascii", "ignore")[:NUM_CHARACTERS], np.uint8).astype(np.int32)
    num_rows = max(len(text) // size.length // size.batch_size, 1) * size.batch_size
    text = np.resize(text, num_rows * size.length + 1)
    return text[:-1].reshape(num_rows, size.length), text[1:].reshape(num_rows, size.length)


def train(arguments):
    import keras

    import replicax as rx

    rx.config.set_local_devices(8)  # has no effect on GPUs
    size = SIZES[arguments.size]
    if arguments.size != "small":
        keras.config.set_dtype_policy("mixed_bfloat16")
    layout_map = rx.experimental.layouts.for_model(
        lambda: make_model(size), devices_per_replica=arguments.devices_per_replica
    )
    strategy = rx.MirroredStrategy(
        devices_per_replica=arguments.devices_per_replica, layout_map=layout_map, shard_state="all"
    )
    with strategy.scope():
        model = make_model(size)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.Adam(3e-3), loss)
    saving = rx.keras.callbacks.CheckpointCallback(arguments.directory) if arguments.directory else None

    def end_of_epoch(epoch, logs):
        print(f"epoch {epoch + 1}   loss {logs['loss']:.5f}", flush=True)

    def start_of_epoch(epoch, logs):
        if epoch == arguments.killed_after:
            saving.manager.wait()  # for the thread that writes
            os.kill(os.getpid(), signal.SIGKILL)

    telling = keras.callbacks.LambdaCallback(on_epoch_begin=start_of_epoch, on_epoch_end=end_of_epoch)
    model.fit(
        *make_data(size),
        batch_size=size.batch_size,
        epochs=NUM_EPOCHS,
        shuffle=False,
        verbose=0,
        callbacks=[telling, *([saving] if saving else [])],
    )
    variables = [*model.variables, *model.optimizer.variables]
    whole = sum(variable.value.nbytes for variable in variables)
    held = sum(variable.value.addressable_shards[0].data.nbytes for variable in variables)
    print(f"a device holds {held:,} of {whole:,} bytes of state; an eighth is {whole // 8:,}")


def losses_of(*options):
    """Trains in a process of its own.

    Returns:
      The losses of the epochs that it ran, as text.
    """
    command = [sys.executable, __file__, "train", *map(str, options)]
    lines = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout.splitlines()
    for line in lines:
        if not line.startswith("epoch"):
            print(line)
    return {int(line.split()[1]): line.split()[3] for line in lines if line.startswith("epoch")}


def show():
    with tempfile.TemporaryDirectory() as directory:
        saved = "--directory", directory
        columns = {
            "4 x 2": losses_of("--devices-per-replica", 2),
            "4 x 2, killed": losses_of("--devices-per-replica", 2, *saved, "--killed-after", 2),
            "2 x 4, resumed": losses_of("--devices-per-replica", 4, *saved),
        }
    print("epoch", *(f"{title:>15}" for title in columns))
    for epoch in range(1, NUM_EPOCHS + 1):
        print(f"{epoch:5}", *(f"{losses.get(epoch, ''):>15}" for losses in columns.values()))
    for topology, compiler in PLANS.items():
        if importlib.util.find_spec(compiler) is None:
            print(f"no plan for {topology}; in the source's folder: pip install '.[plan-gpu,plan-tpu]'")
            continue
        options = ["--topology", topology, "--global-batch", "256", __file__, "train"]
        command = [
            sys.executable,
            "-m",
            "replicax",
            "plan",
            *options,
            "--size",
            "7b",
            "--devices-per-replica",
            "4",
        ]
        subprocess.run(command, check=False)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", nargs="?", choices=["show", "train"], default="show")
    parser.add_argument("--devices-per-replica", type=int, default=2)
    parser.add_argument("--directory", help="of the checkpoints")
    parser.add_argument("--killed-after", type=int, help="this number of epochs, which are saved")
    parser.add_argument("--size", choices=SIZES, default="small")
    arguments = parser.parse_args()
    if arguments.action == "train":
        train(arguments)
    else:
        show()


if __name__ == "__main__":
    main()

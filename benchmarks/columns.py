"""Compares what a step pays for its data where a batch has many columns, and where the arrays have many rows: replicax
beside Keras's own adapter, grain, and the same step by hand.

    python benchmarks/columns.py --rounds 10

The seconds are processor time, with that of the threads that prefetch.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import itertools
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("KERAS_BACKEND", "jax")
sys.path.insert(0, str(Path(__file__).parent))

import replicax as rx

rx.config.set_local_devices(2)

import grain.python as grain
import jax
import keras
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import columns_process
import rounds
from peer_process import PeerProcess

BATCH = 128
NUM_COLUMNS, COLUMN_ROWS = columns_process.NUM_COLUMNS, columns_process.ROWS
NUM_ROWS, NUM_FEATURES = 1_000_000, 16
NUM_STEPS = columns_process.NUM_STEPS
OURS, KERAS, GRAIN = "replicax", "Keras's adapter", "grain"

Batches = Iterator[Any]


def main(num_rounds: int, only: Sequence[str] = ()) -> None:
    """Prints each section that ``only`` names, or all."""
    for name, section in SECTIONS.items():
        if not only or name in only:
            section(num_rounds)


# --- batches without a step -----------------------------------------------------------------------------


def reading(num_rounds: int) -> None:
    """Reads batches to the host, and to 2 devices. The bar: at most Keras's processor time, and grain's."""
    rng = np.random.default_rng(0)
    columns = columns_process.columns()
    rows = rng.normal(size=(NUM_ROWS, NUM_FEATURES)).astype(np.float32)
    labels = rng.integers(0, 10, NUM_ROWS).astype(np.int32)
    for title, arrays in (
        (f"a dict of {NUM_COLUMNS} columns", columns),
        (f"{NUM_ROWS:,} rows of {NUM_FEATURES}", (rows, labels)),
    ):
        for shuffles in (False, True):
            order = "shuffled" if shuffles else "in order"
            _compare(
                f"Batches of {BATCH} on the host: {title}, {order}", _on_host(arrays, shuffles), num_rounds
            )
            _compare(
                f"Batches of {BATCH} on 2 devices: {title}, {order}", _placed(arrays, shuffles), num_rounds
            )


def _on_host(arrays: Any, shuffles: bool) -> dict[str, Batches]:
    return {
        OURS: _for_ever(lambda: _rows(arrays, shuffles)),
        KERAS: _for_ever(lambda: _keras_adapter(arrays, shuffles)),
        GRAIN: _for_ever(lambda: _grain_dataset(arrays, shuffles)),
    }


def _placed(arrays: Any, shuffles: bool) -> dict[str, Batches]:
    strategy = rx.MirroredStrategy()
    mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    row = NamedSharding(mesh, PartitionSpec("replica"))

    def put(batches: Batches) -> Batches:
        return (jax.device_put(batch, row) for batch in batches)

    return {
        OURS: iter(strategy.experimental_distribute_dataset(_rows(arrays, shuffles).repeat())),
        KERAS: put(_for_ever(lambda: _keras_adapter(arrays, shuffles))),
        GRAIN: put(_for_ever(lambda: _grain_dataset(arrays, shuffles))),
    }


def _rows(arrays: Any, shuffles: bool) -> Any:
    dataset = rx.data.from_arrays(arrays)
    return (dataset.shuffle(seed=0) if shuffles else dataset).batch(BATCH, drop_remainder=True)


def _keras_adapter(arrays: Any, shuffles: bool) -> Batches:
    """The adapter that ``Model.fit`` makes of arrays."""
    from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter

    x, y = arrays if isinstance(arrays, tuple) else (arrays, None)
    batches = ArrayDataAdapter(x, y, batch_size=BATCH, shuffle=shuffles).get_jax_iterator()
    full = len(keras.tree.flatten(arrays)[0]) // BATCH
    return itertools.islice(iter(batches), full)


def _grain_dataset(arrays: Any, shuffles: bool) -> Any:
    dataset = grain.MapDataset.source(_GrainRows(arrays))
    dataset = dataset.shuffle(seed=0) if shuffles else dataset
    dataset = dataset.batch(BATCH, drop_remainder=True)
    # Its threads would read far ahead, in the time of the others.
    return dataset.to_iter_dataset(grain.ReadOptions(num_threads=0, prefetch_buffer_size=0))


class _GrainRows:
    """The rows of a pytree of arrays, as grain's sources give them."""

    def __init__(self, arrays: Any):
        self._leaves, self._tree = jax.tree.flatten(arrays)

    def __len__(self) -> int:
        return len(self._leaves[0])

    def __getitem__(self, number: int) -> Any:
        return self._tree.unflatten([leaf[number] for leaf in self._leaves])


def _for_ever(start: Callable[[], Any]) -> Batches:
    return itertools.chain.from_iterable(start() for _ in itertools.repeat(None))


# --- batches with a step --------------------------------------------------------------------------------


def steps(num_rounds: int) -> None:
    """``run`` of a step that sums 200 columns, beside the same program by hand with Keras's adapter."""
    columns = columns_process.columns()
    strategy = rx.MirroredStrategy()
    batches = iter(strategy.experimental_distribute_dataset(_rows(columns, False).repeat()))
    mesh = jax.make_mesh((2,), ("replica",), axis_types=(jax.sharding.AxisType.Auto,))
    row = NamedSharding(mesh, PartitionSpec("replica"))

    def total(batch: Any) -> Any:
        return sum(column.sum() for column in batch.values())

    @jax.jit
    @jax.shard_map(mesh=mesh, in_specs=PartitionSpec("replica"), out_specs=PartitionSpec("replica"))
    def by_hand(batch: Any) -> Any:
        return total(batch)[None]

    ours = (strategy.run(total, args=(batch,)) for batch in batches)
    read = _for_ever(lambda: _keras_adapter(columns, False))
    theirs = (by_hand(jax.device_put(batch, row)) for batch in read)
    _compare(f"A step on a dict of {NUM_COLUMNS} columns", {"run": ours, "by hand": theirs}, num_rounds)


def fit(num_rounds: int) -> None:
    """``fit`` of a dict of 200 columns, beside Keras on one device and its DataParallel."""
    with contextlib.ExitStack() as closing:
        processes = {
            name: closing.enter_context(
                contextlib.closing(
                    PeerProcess(
                        sys.executable, "columns_process.py", {"contestant": contestant, "data": data}
                    )
                )
            )
            for name, (contestant, data) in columns_process.CONTESTANTS.items()
        }
        wall: dict[str, list[float]] = {name: [] for name in processes}
        cpu: dict[str, list[float]] = {name: [] for name in processes}
        for number in range(num_rounds + 1):
            names = list(processes)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                seconds, processor = processes[name].run(NUM_STEPS)
                if number:  # the first compiles
                    wall[name].append(seconds / NUM_STEPS)
                    cpu[name].append(processor / NUM_STEPS)
    _report(f"fit, one step on a dict of {NUM_COLUMNS} columns, batch {BATCH}", cpu, wall)


def _compare(title: str, contestants: dict[str, Batches], num_rounds: int) -> None:
    """Takes steps in alternation, by processor time."""
    wall: dict[str, list[float]] = {name: [] for name in contestants}
    cpu: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(num_rounds + 1):
        names = list(contestants)
        for name in names[number % len(names) :] + names[: number % len(names)]:
            steps = 4 if name == GRAIN else NUM_STEPS // 4  # of grain's, one takes as long as 100 of ours
            start, processor = time.perf_counter(), time.process_time()
            (last,) = collections.deque(itertools.islice(contestants[name], steps), maxlen=1)
            jax.block_until_ready(last)
            if number:  # the first compiles
                wall[name].append((time.perf_counter() - start) / steps)
                cpu[name].append((time.process_time() - processor) / steps)
    _report(title, cpu, wall)


def _report(title: str, cpu: dict[str, list[float]], wall: dict[str, list[float]]) -> None:
    timings = {name: rounds.Timing(values) for name, values in cpu.items()}
    rounds.report(title, timings, next(iter(cpu)), unit="µs of processor time per step")
    medians = ", ".join(f"{name} {statistics.median(values) * 1e6:.0f}" for name, values in wall.items())
    print(f"  µs by the clock: {medians}")


SECTIONS: dict[str, Callable[[int], None]] = {"reading": reading, "steps": steps, "fit": fit}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="interleaved rounds (default 10)")
    parser.add_argument("--only", choices=SECTIONS, action="append", default=[], help="one section")
    arguments = parser.parse_args()
    main(arguments.rounds, arguments.only)

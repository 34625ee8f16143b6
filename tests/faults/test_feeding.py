"""Loops fed by a distributed dataset: memory, threads, and the end of the process."""

import gc
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx

SOURCE = Path(__file__).parents[2] / "src"


def test_memory_stays_flat():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        total = rx.Variable(0.0)

    def step(x):
        total.assign_add(rx.get_replica_context().all_reduce("SUM", jnp.sum(x)))

    gc.collect()  # or arrays that earlier tests have left would go meanwhile
    rows = rx.data.from_arrays(np.ones(64, np.float32)).shuffle(seed=0).batch(8).repeat()
    iterator = iter(strategy.experimental_distribute_dataset(rows))
    counts = []
    for number in range(1500):
        strategy.run(step, args=(next(iterator),))
        if number % 100 == 50:
            counts.append(len(jax.live_arrays()))
    iterator.close()
    assert float(total.numpy()) == 8 * 1500
    assert max(counts[1:]) - min(counts[1:]) < 100  # those that are waiting; one of each step would be 1,400


def test_the_threads_options_hold_while_reading_ahead():
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    with jax.enable_x64(True):
        (element,) = strategy.experimental_distribute_dataset([np.arange(4)])
    assert element.dtype == np.int64


@pytest.mark.parametrize(
    "ending",
    [
        "",
        pytest.param("raise KeyError('mine')", marks=pytest.mark.rest),
        *(pytest.param(ending, marks=pytest.mark.long) for ending in ["iterator.close()", "del iterator"]),
    ],
)
def test_a_process_ends_while_its_source_is_slow(ending):
    program = f"""
        import time
        import numpy as np
        import replicax as rx

        rx.config.set_local_devices(2)
        strategy = rx.MirroredStrategy()

        def slow():
            yield np.arange(4)
            {"yield np.arange(4); yield np.arange(4)" if "close" in ending else "time.sleep(600)"}
            yield np.arange(4)

        iterator = iter(strategy.experimental_distribute_dataset(slow()))
        next(iterator)
        print("ready", flush=True)
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert "ready" in done.stdout
    assert done.returncode == ("KeyError" in ending), done.stderr
    assert ("KeyError" in done.stderr) == ("KeyError" in ending)
    assert "Fatal" not in done.stderr

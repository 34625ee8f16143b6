"""Thousands of queued steps with collectives do not exhaust XLA's CPU thread pool: each runs in a separate process.

Left alone, XLA ends such a process after 40 s ("Termination timeout for all reduce"; jax 0.10 on 2 cores).
"""

import collections
import logging
import os
import subprocess
import sys

import numpy as np
import pytest

from replicax._src.lowering.spmd import _InFlight as InFlight

STEPS = 2000
POOL_OF_TWO = {"PJRT_NPROC": "2"}  # what JAX itself chooses on two cores


def run_here(num_devices, mode, **environment):
    clean = {
        k: v for k, v in os.environ.items() if k not in ("PJRT_NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES")
    }
    process = subprocess.run(
        [sys.executable, __file__, str(num_devices), mode],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**clean, **environment},
    )
    assert process.returncode == 0, process.stderr
    return float(process.stdout), [line for line in process.stderr.splitlines() if "thread pool" in line]


@pytest.mark.parametrize(
    ("num_devices", "mode"),
    [
        (2, "run"),
        pytest.param(2, "function", marks=pytest.mark.long),
        pytest.param(8, "run", marks=pytest.mark.long),
        pytest.param(8, "function", marks=pytest.mark.rest),
    ],
)
def test_queued_steps_finish(num_devices, mode):
    assert run_here(num_devices, mode) == (STEPS * num_devices, [])


@pytest.mark.parametrize(
    "mode", ["run", *(pytest.param(mode, marks=pytest.mark.long) for mode in ("reduce", "gather")), "read"]
)
@pytest.mark.rest
def test_queued_programs_finish_with_a_small_pool(mode):
    result, warnings = run_here(4, mode, **POOL_OF_TWO)
    assert result == STEPS * 4
    assert len(warnings) == (mode != "read")


@pytest.mark.rest
def test_backend_that_started_first_works_with_one_warning():
    result, warnings = run_here(2, "backend_first", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert result == STEPS * 2
    (warning,) = warnings
    assert "before JAX is first used" in warning
    assert "set_local_devices" in warning
    assert "PJRT_NPROC=16" in warning


@pytest.mark.parametrize(("pool", "limit"), [("16", 4), ("64", 4), ("2", 1), ("", 1)])
def test_number_of_programs_in_flight(monkeypatch, pool, limit):
    monkeypatch.setenv("PJRT_NPROC", pool)
    waited = []

    class Token:
        def __init__(self, number):
            self.number = number

        def block_until_ready(self):
            waited.append(self.number)

    in_flight = InFlight()
    for number in range(10):
        in_flight.add(Token(number))
        assert waited == list(range(number + 1 - limit))  # the oldest, as soon as there are too many


# --- in the process -----------------------------------------------------------------------------------


def main(num_devices, mode):
    logging.basicConfig(level=logging.WARNING)
    import jax.numpy as jnp

    import replicax as rx

    if mode == "backend_first":
        jnp.ones(3).block_until_ready()
    else:
        rx.config.set_local_devices(num_devices)
    strategy = rx.MirroredStrategy()
    assert strategy.num_replicas_in_sync == num_devices
    ones = jnp.ones((128, 128))
    with strategy.scope():
        total = rx.Variable(jnp.zeros((128, 128)))
        components = rx.Variable(jnp.zeros((128, 128)), synchronization="ON_READ", aggregation="SUM")

    def step(x):
        # Two collectives, the second of which needs the first, and work between them.
        mean = rx.get_replica_context().all_reduce("MEAN", x @ jnp.eye(128))
        total.assign_add(rx.get_replica_context().all_reduce("SUM", mean @ jnp.eye(128)))

    def of_each_replica(x):
        components.assign_add(x * STEPS)
        return x * (rx.get_replica_context().replica_id_in_sync_group + 1)

    per_replica = strategy.run(of_each_replica, (ones,))
    function = rx.function(lambda x: strategy.run(step, (x,)))
    queue = {
        "run": lambda: strategy.run(step, (ones,)),
        "backend_first": lambda: strategy.run(step, (ones,)),
        "function": lambda: function(ones),
        "reduce": lambda: strategy.reduce("SUM", per_replica, axis=None),
        "gather": lambda: strategy.gather(per_replica, axis=0),
        "read": lambda: components.value,
    }[mode]
    kept = collections.deque(maxlen=50)
    for _ in range(STEPS):
        kept.append(queue())
    last = np.asarray(kept.pop()) if kept[-1] is not None else None
    if mode == "reduce":  # 1 + 2 + ... + R
        print(STEPS * num_devices * last[0, 0] / (num_devices * (num_devices + 1) / 2))
    elif mode == "gather":
        print(STEPS * last[-1, 0])
    else:
        print(last[0, 0] if mode == "read" else total.value[0, 0])


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])

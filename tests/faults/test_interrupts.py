"""Ctrl-C twice ends the process as SIGINT does (130 in a shell), without messages of C++ or of exit handlers."""

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from checks import path_of_programs

pytestmark = pytest.mark.timeout(250)

LOOP = """
import atexit, os, signal, sys
import jax
if sys.argv[1:] == ["interrupted at exit"]:
    # It runs before JAX's own exit handlers.
    atexit.register(os.kill, os.getpid(), signal.SIGINT)
import jax.numpy as jnp
import replicax as rx

strategy = rx.MirroredStrategy()
with strategy.scope():
    weights = rx.Variable(jnp.ones((50, 50)))

def step(x):
    weights.assign(weights.value + rx.get_replica_context().all_reduce("SUM", x @ weights.value) * 1e-6)

print("steps", flush=True)
for number in range(10**9):
    strategy.run(step, args=(jnp.ones((50, 50)),))
    if number == 20 and len(sys.argv) > 1:
        signal.raise_signal(signal.SIGINT)
"""
FIT = """
import keras
import numpy as np
import replicax as rx

with rx.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((1024, 8), np.float32)
print("steps", flush=True)
model.fit(x, x[:, :1], batch_size=32, epochs=10**6, verbose=0)
"""


def started(source, *arguments):
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(source), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()},
    )


def assert_interrupted(process, output):
    assert process.returncode == -signal.SIGINT, output
    assert "KeyboardInterrupt" in output
    assert not re.search("terminate called|ignored in atexit|Fatal", output), output


def test_an_interrupt_in_the_exit_handlers_ends_the_process_at_once():
    with started(LOOP, "interrupted at exit") as process:
        assert_interrupted(process, process.communicate(timeout=100)[1])


@pytest.mark.long
@pytest.mark.parametrize("source", [LOOP, FIT], ids=["loop", "fit"])
@pytest.mark.parametrize("trial", range(10))
def test_two_interrupts_within_a_second_end_the_process(source, trial):
    moment = random.Random(trial)
    with started(source) as process:
        assert process.stdout.readline() == "steps\n"
        for longest_s in (0.8, 0.2):
            time.sleep(moment.uniform(0, longest_s))
            process.send_signal(signal.SIGINT)
        assert_interrupted(process, process.communicate(timeout=100)[1])


KEEPS = """
import random, signal
import numpy as np
import keras
import replicax as rx

rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()
with strategy.scope():
    variables = [rx.Variable(np.zeros((3, 3), np.float32)) for _ in range(20)]
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(32, "relu"), keras.layers.Dense(1)])
    model.compile("adam", "mse")
x = np.ones((64, 8), np.float32)

def step():
    for variable in variables:
        variable.assign_add(np.ones((3, 3), np.float32))

def fit():
    model.fit(x, x[:, :1], batch_size=8, epochs=10**6, verbose=0)

def loop():
    while True:
        strategy.run(step)

code = rx.function(lambda: strategy.run(step))

def function():
    while True:
        code()

def interrupt(*args):
    raise KeyboardInterrupt

signal.signal(signal.SIGALRM, interrupt)
strategy.run(step), code()
model.fit(x, x[:, :1], batch_size=8, verbose=0)
moment, lost = random.Random(0), 0
train = {"loop": loop, "function": function, "fit": fit}[__import__("sys").argv[1]]
for _ in range(40):
    try:
        signal.setitimer(signal.ITIMER_REAL, moment.uniform(2e-3, 2e-2), 5.0)  # again, if a destructor swallows it
        train()
    except KeyboardInterrupt:
        pass
    except RuntimeError as error:  # Python's own: the interrupt came where a Condition takes its lock back
        assert "release unlocked lock" in str(error)
    signal.setitimer(signal.ITIMER_REAL, 0)
    try:
        counts = {float(variable.numpy()[0, 0]) for variable in variables}
        assert len(counts) == 1, "all variables are of one step"
        model.get_weights()
    except RuntimeError:
        lost += 1
        break
print("lost", lost, flush=True)
# Keras's callbacks start threads of a pool. Python's exit waits forever for one whose start was interrupted.
__import__("os")._exit(0)
"""


@pytest.mark.rest
@pytest.mark.parametrize(
    "train", [*(pytest.param(train, marks=pytest.mark.long) for train in ("loop", "function")), "fit"]
)
def test_an_interrupt_loses_no_state(train):
    """Ctrl-C may come while a step runs, which owns the memory of the variables."""
    with started(KEEPS, train) as process:
        try:
            output, errors = process.communicate(timeout=200)
        finally:
            process.kill()
    assert "lost 0" in output, errors

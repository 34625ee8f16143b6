"""Programs that compile slowly are announced, with their name and time, by the first process, on separate lines."""

import functools
import json
import logging
import os
import pty
import struct
import subprocess
import sys
import termios
import threading
import time
from fcntl import ioctl

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.cluster import chief, progress
from terminal import Terminal

SLOW_S = 0.2
LIMIT_S = 120


@pytest.fixture(autouse=True)
def speaking(monkeypatch):
    """As in a separate process: strategies of other tests may have given this one a role."""
    monkeypatch.setattr(chief, "_roles", [])
    monkeypatch.delenv("REPLICAX_PROGRESS", raising=False)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(progress, "SILENT_S", 0.05)


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


def slowly(value):
    """Takes time while it is traced, and none when it runs."""
    time.sleep(SLOW_S)
    return value + 1


def lines_of(capsys):
    return capsys.readouterr().err.splitlines()


class Slow(keras.layers.Layer):
    def call(self, x):
        time.sleep(SLOW_S)
        return x


def model_in(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def run(strategy):
    def step(x):
        return slowly(x)

    return functools.partial(strategy.run, step, args=(jnp.ones(()),)), "step for 2 replicas"


def function(strategy):
    @rx.function
    def train(x):
        return strategy.run(slowly, args=(x,))

    def call():
        with strategy.scope():
            train(jnp.ones(()))

    return call, "train for 2 replicas"


def run_steps(strategy):
    dataset = rx.data.from_arrays(np.ones((32, 1), "float32")).batch(2)
    iterator = iter(strategy.experimental_distribute_dataset(dataset))
    return functools.partial(strategy.run_steps, slowly, iterator, 4), "run_steps of slowly for 2 replicas"


def fit(strategy):
    x, y = np.ones((4, 2), "float32"), np.ones((4, 1), "float32")
    return (
        functools.partial(model_in(strategy).fit, x, y, batch_size=4, verbose=0),
        "Sequential.train_step for 2 replicas",
    )


def predict(strategy):
    x = np.ones((4, 2), "float32")
    return functools.partial(
        model_in(strategy).predict, x, verbose=0
    ), "Sequential.predict_step for 2 replicas"


@pytest.mark.parametrize("make", [run, function, run_steps, fit, predict])
def test_compilation_is_announced_once(make, strategy, soon, capsys):
    call, name = make(strategy)
    capsys.readouterr()
    call()
    said, took = lines_of(capsys)
    assert said == f"replicax: compiling {name} …"
    assert took.startswith(f"replicax: compiled {name} in ")
    assert float(took.split()[-2]) >= SLOW_S
    call()
    assert lines_of(capsys) == [], "a step that is compiled says nothing"


def test_a_second_compilation_says_why(strategy, soon, capsys):
    """A partial last batch compiles the step again: the line says so, in loops and in `fit`."""

    def step(x, scale):
        return slowly(x) * scale

    dataset = rx.data.from_arrays(np.ones((11, 1), "float32")).batch(4)
    for batch in strategy.experimental_distribute_dataset(dataset):
        strategy.run(step, args=(batch, 1.0))
    (batch, *_) = strategy.experimental_distribute_dataset(dataset)
    strategy.run(step, args=(batch, 2.0))
    said = [line for line in lines_of(capsys) if "compiling" in line]
    assert said == [
        "replicax: compiling step for 2 replicas …",
        "replicax: compiling step for 2 replicas again, for a smaller batch, 3 rows after 4 …",
        "replicax: compiling step for 2 replicas again, because 1.0 became float32[] …",
    ]
    model = model_in(strategy)
    model.fit(
        np.ones((11, 2), "float32"), np.ones((11, 1), "float32"), batch_size=4, verbose=0, shuffle=False
    )
    said = [line for line in lines_of(capsys) if "compiling" in line]
    assert said[-1] == (
        "replicax: compiling Sequential.train_step for 2 replicas again, for a smaller batch, 3 rows after 4 …"
    )


def test_work_inside_work_is_a_part_of_it(soon, capsys):
    with progress.compiling("outer", 2):
        time.sleep(SLOW_S)
        with progress.compiling("inner", 1):
            time.sleep(SLOW_S)
    assert [line.split()[2] for line in lines_of(capsys)] == ["outer", "outer"]


def test_quick_work_is_not_announced_and_leaves_no_thread(capsys):
    before = set(threading.enumerate())  # of which some may be ending
    with progress.compiling("step", 2):
        assert [t.name for t in set(threading.enumerate()) - before] == ["replicax progress"]
    deadline = time.monotonic() + 60
    while any(t.name == "replicax progress" for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert lines_of(capsys) == []


def test_nothing_is_announced_after_an_error(soon, capsys):
    @progress.compiling("step", 2)
    def fail():
        time.sleep(SLOW_S)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert lines_of(capsys) == ["replicax: compiling step for 2 replicas …"]
    with progress.compiling("another", None):
        time.sleep(SLOW_S)
    assert lines_of(capsys)[0] == "replicax: compiling another …"


def test_dataset_loop_in_a_function_is_not_announced_as_compilation(strategy, soon, capsys):
    dataset = strategy.experimental_distribute_dataset(
        rx.data.from_arrays(np.ones((4, 1), "float32")).batch(2)
    )

    @rx.function
    def epoch(dataset):
        time.sleep(SLOW_S)  # outside of every program
        for _ in dataset:
            pass

    epoch(dataset)
    assert lines_of(capsys) == []


@pytest.mark.parametrize("how", ["variable", "level", "other process", "not the chief"])
def test_quiet(how, soon, capsys, monkeypatch):
    if how == "variable":
        monkeypatch.setenv("REPLICAX_PROGRESS", "0")
    elif how == "level":
        monkeypatch.setattr(logging.getLogger("replicax"), "level", logging.WARNING)
    elif how == "not the chief":
        monkeypatch.setattr(chief, "_roles", [False])
    else:
        cluster = {"worker": ["a:1", "b:1"]}
        monkeypatch.setenv(
            "TF_CONFIG", json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 1}})
        )
    with progress.compiling("step", 2):
        time.sleep(SLOW_S)
    assert lines_of(capsys) == []


def test_invalid_environment_does_not_silence_progress(monkeypatch, capsys):
    monkeypatch.setenv("TF_CONFIG", "{")
    assert progress.say("hello")
    assert lines_of(capsys) == ["replicax: hello"]


def test_a_closed_standard_error_does_not_stop_the_program(soon, monkeypatch):
    stream = open(os.devnull, "w")  # noqa: SIM115
    stream.close()
    for broken in (stream, None):
        monkeypatch.setattr(sys, "stderr", broken)
        with progress.compiling("step", 2):
            time.sleep(SLOW_S)


# --- on a terminal ------------------------------------------------------------------------------------

BAR = """
import os, time
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np, replicax as rx
from replicax._src.cluster import progress
progress.SILENT_S = 0.2

class Slow(keras.layers.Layer):
    def call(self, x):
        time.sleep(0.5)
        return x

rx.config.set_local_devices(2)
with rx.MirroredStrategy().scope():
    model = keras.Sequential([keras.Input((2,)), Slow(), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x, y = np.ones((8, 2), "float32"), np.ones((8, 1), "float32")
model.fit(x, y, batch_size=2, epochs=2, validation_data=(x, y))
print("no newline", end="", flush=True)
model.predict(x, verbose=0)
print("the end")
"""


def on_terminal(script, columns):
    """The text on a terminal's lines when a script has ended."""
    ours, its = pty.openpty()
    ioctl(its, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color", "JAX_PLATFORMS": "cpu"}
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdin=its, stdout=its, stderr=its, env=environment, close_fds=True
    )
    os.close(its)
    written = []

    def read():
        while True:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the other end is closed
                return
            if not data:
                return
            written.append(data)

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        assert process.wait(LIMIT_S) == 0, b"".join(written).decode()
    finally:
        process.kill()
        process.wait()
    reader.join(LIMIT_S)
    os.close(ours)
    terminal = Terminal(columns)
    terminal.feed(b"".join(written).decode())
    return terminal.lines


@pytest.mark.rest
def test_lines_stand_beside_the_progress_bar_of_keras():
    lines = on_terminal(BAR, 110)
    said = [line for line in lines if "replicax" in line]
    starts = ["compiling Sequential.train_step", "compiled Sequential.train_step"]
    starts += ["compiling Sequential.test_step", "compiled Sequential.test_step"]
    starts += ["compiling Sequential.predict_step", "compiled Sequential.predict_step"]
    assert len(said) == len(starts), lines
    for line, start in zip(said, starts, strict=True):
        assert line.startswith(f"replicax: {start} for 2 replicas"), line
        assert line.endswith((" …", " s.")), line
    finished = [line for line in lines if line.startswith("4/4 ") and "val_loss" in line]
    assert len(finished) == 2, lines
    assert "no newline" in lines, "what the program has written stays"
    assert lines[-1] == "the end"
    assert lines[lines.index("Epoch 1/2") + 1] == said[0], "no empty line before it"


def test_a_terminal_without_a_size_gets_a_new_line(soon, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress.say("hello")
    assert capsys.readouterr().err == "\nreplicax: hello\n"
    monkeypatch.setenv("TERM", "dumb")
    progress.say("hello")
    assert capsys.readouterr().err == "replicax: hello\n"


def test_users_jit_is_not_announced(soon, capsys):
    jax.jit(slowly)(1.0)
    assert lines_of(capsys) == []


def test_a_stream_that_can_only_write_and_a_thread_that_cannot_start_fail_no_step(soon, monkeypatch):
    class Tee:
        def write(self, text):
            pass

    monkeypatch.setattr(sys, "stderr", Tee())
    assert progress.say("hello")

    def start(timer):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", start)
    with progress.working("compiling", "compiled"):
        pass
    assert not progress._here.is_working

"""Tracebacks end at the user's line, in at most 15 lines."""

import contextlib
import dataclasses
import gc
import pickle
import subprocess
import sys
import traceback
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from replicax import errors
from short_tracebacks import check, run

HEAD = """
import os
os.environ["KERAS_BACKEND"] = "jax"
import jax.numpy as jnp, numpy as np, replicax as rx
rx.config.set_local_devices(2)
strategy = rx.MirroredStrategy()
batch = strategy.experimental_distribute_values_from_function(lambda c: np.ones((2, 3), np.float32))
"""
MODEL = """
import keras
class Broken(keras.layers.Layer):
    def call(self, x):
        return x @ jnp.ones((7, 7))  # HERE
with strategy.scope():
    model = keras.Sequential([keras.Input((3,)), LAYER])
    model.compile("sgd", "mse")
x = np.ones((8, 3), np.float32)
"""
PROGRAMS = {
    "python_if": "def step(x):\n    if jnp.sum(x) > 0:  # HERE\n        return x\nstrategy.run(step, (batch,))",
    "shape_in_rx_function": (
        "def step(x):\n    return x @ jnp.ones((7, 7))  # HERE\n"
        "@rx.function\ndef train(x):\n    return strategy.run(step, (x,))\ntrain(batch)"
    ),
    "users_error": "def step(x):\n    return {}['loss']  # HERE\nstrategy.run(step, (batch,))",
    "our_error": "strategy.reduce('AVG', batch, axis=None)  # HERE",
    "constructor": "rx.MirroredStrategy(['cpu:0', 'cpu:7'])  # HERE",
    "method_typo": "strategy.rnu(abs)  # HERE",
    "property": (
        "with strategy.scope():\n    v = rx.Variable(1.0, synchronization='ON_READ')\n"
        "def assign(c):\n    return v.assign(rx.get_replica_context().replica_id_in_sync_group)\nv.value  # HERE"
    ),
    "condition": (
        "def branch(x):\n    return x @ jnp.ones((7, 7))  # HERE\n"
        "strategy.run(lambda x: rx.cond(jnp.sum(x) > 0, lambda: branch(x), lambda: x), (batch,))"
    ),
    "eager": "def step(x):\n    return {}['loss']  # HERE\nstrategy.run(step, (batch,), options=rx.RunOptions(eager=True))",
    "dataset": (
        "def rows():\n    yield np.ones((2, 3))\n    raise KeyError('row')  # HERE\n"
        "for each in strategy.experimental_distribute_dataset(rows()):\n    pass"
    ),
    "undistributable": "strategy.experimental_distribute_dataset(object())  # HERE",
    "tape": "with rx.GradientTape() as tape:  # HERE\n    pass",
    "layer": MODEL.replace("  # HERE", "").replace("LAYER", "keras.layers.Dense(2)")
    + "strategy.run(lambda x: model(x[:, :2]), (batch,))  # HERE",
    "fit": MODEL.replace("  # HERE", "").replace("LAYER", "keras.layers.Dense(2)")
    + "model.fit(x[:, :2], x, verbose=0)  # HERE",
    "evaluate": MODEL.replace("  # HERE", "").replace("LAYER", "keras.layers.Dense(2)")
    + "model.evaluate(x[:, :2], x, verbose=0)  # HERE",
    "callback": MODEL.replace("  # HERE", "").replace("LAYER", "keras.layers.Dense(3)")
    + "class Stops(keras.callbacks.Callback):\n    def on_epoch_end(self, epoch, logs=None):\n        logs['x']  # HERE\n"
    + "model.fit(x, x, verbose=0, callbacks=[Stops()])",
}


QUICK = ("python_if", "shape_in_rx_function")


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.rest) for name in PROGRAMS]
)
def test_traceback_is_short_and_ends_at_the_users_line(name, tmp_path):
    program = HEAD + PROGRAMS[name]
    check(run(tmp_path, program), program)


# --- notebooks ----------------------------------------------------------------------------------------

# IPython shows the frames of ``sys.exc_info()`` in its own code, and those of the causes, each with the lines around
# it.
CELLS = """
import sys
for name, cell in programs.items():
    names = dict(shared)
    try:
        exec(compile(cell, f"<cell {name}>", "exec"), names)
    except Exception:
        _, error, trace = sys.exc_info()
        trace = trace.tb_next  # without this program's own
        while error is not None:
            files = []
            while trace is not None:
                files.append(trace.tb_frame.f_code.co_filename)
                trace = trace.tb_next
            print([name, files])
            error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
            trace = error and error.__traceback__
"""


@pytest.mark.rest
def test_notebooks_show_frames_of_the_cells_only(tmp_path):
    before = f"{HEAD}\nshared, programs = dict(globals()), {PROGRAMS!r}\n"
    done = subprocess.run(
        [sys.executable, "-c", before + CELLS], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    shown = [eval(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert {name for name, _ in shown} == set(PROGRAMS)
    for name, files in shown:
        assert set(files) <= {f"<cell {name}>"}, (name, files)
        assert len(files) <= 4, "IPython shows each in about four lines"


@pytest.mark.rest
def test_full_shows_all_frames(tmp_path):
    text = run(tmp_path, HEAD + PROGRAMS["shape_in_rx_function"], REPLICAX_TRACEBACK="full")
    assert "/replicax/_src/" in text
    assert "/jax/_src/" in text


def raised():
    def step(x):
        if jnp.sum(x) > 0:
            return x
        return -x

    with pytest.raises(errors.TracedConditionError) as found:
        rx.MirroredStrategy(["cpu:0", "cpu:1"]).run(step, (np.ones(3),))
    return found.value


def test_frames_in_this_process_are_the_tests_own_as_pytest_shows_them():
    files = {frame.filename for frame in traceback.extract_tb(raised().__traceback__)}
    assert files == {__file__}


def files_of(error):
    return {frame.filename for frame in traceback.extract_tb(error.__traceback__)}


def test_an_error_that_the_caller_handles_keeps_its_frames():
    try:
        jnp.ones(2) @ jnp.ones(3)
    except TypeError as handled:
        before = files_of(handled)
        error = raised()
        after = files_of(handled)
    assert len(before) > 1
    assert after == before
    assert type(error.__context__.__context__) is TypeError
    assert files_of(error) == files_of(error.__context__) == {__file__}


def test_errors_pickle_with_notes_and_causes():
    error = raised()
    error.add_note("a note")
    again = pickle.loads(pickle.dumps(error))
    assert (type(again), again.args, again.__notes__) == (type(error), error.args, ["a note"])
    assert type(error.__context__).__name__ == "TracerBoolConversionError"


def test_the_message_is_the_last_word():
    """JAX adds a note of frames that it has removed; it is not for users of replicax, and is not the message."""

    def step(x):
        return jax.lax.fori_loop(0, 2, lambda i, x: x + undefined, x)  # noqa: F821

    with pytest.raises(NameError) as found:
        rx.MirroredStrategy(["cpu:0", "cpu:1"]).run(step, (np.ones(3),))
    assert "undefined" in traceback.format_exception_only(found.value)[-1]


def test_nothing_holds_an_error_after_it_was_caught():
    class Held:
        pass

    held = Held()
    gone = weakref.ref(held)

    def step(value, held=held):
        raise KeyError(held)

    with contextlib.suppress(KeyError):
        rx.OneDeviceStrategy("cpu:0").run(step, (1,))
    del held, step
    gc.collect()
    assert gone() is None


def test_error_that_rejects_attributes_is_raised_unchanged():
    @dataclasses.dataclass(frozen=True)
    class BadBatch(Exception):
        index: int

    def value_of(context):
        raise BadBatch(3)

    with pytest.raises(BadBatch):
        rx.MirroredStrategy(["cpu:0", "cpu:1"]).experimental_distribute_values_from_function(value_of)

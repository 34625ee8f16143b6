"""Side effects of traced functions: those that surprise are reported once, with the user's line; others are not."""

import collections
import logging
import random
import sys
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.diagnostics import side_effects


@pytest.fixture
def strategy():
    return rx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def told(caplog, monkeypatch):
    """The messages, each as its line in this file and its text."""
    monkeypatch.setattr(side_effects, "_reported", set())
    with caplog.at_level(logging.WARNING, logger="replicax"):
        yield lambda: [record.getMessage() for record in caplog.records]


def line_of(text, fn):
    """``file:line`` of the statement in a function."""
    code = getattr(fn, "__func__", fn).__code__
    with open(__file__) as file:
        lines = file.read().splitlines()
    return f"{__file__}:{lines.index(text, code.co_firstlineno - 1) + 1} in {code.co_name}"


class Trainer:
    num_steps = 0

    def __init__(self):
        self.num_steps, self.losses, self.last, self.totals = 0, [], None, {"loss": 0.0, "n": 0}

    def count(self, x):
        self.num_steps += 1
        return x

    def append(self, x):
        self.losses.append(x * 2)
        return x

    def assign(self, x):
        self.last = x
        return x

    def add(self, x):
        self.totals["loss"] += x
        return x

    def count_item(self, x):
        self.totals["n"] = self.totals["n"] + 1
        return x

    def assign_new(self, x):
        self.never_seen = x
        return x

    def assign_item(self, x):
        self.totals[len(self.losses)] = x
        return x

    def append_logs(self, x):
        self.losses.append({"loss": x * 2, "step": 1})
        return x

    def draw(self, x):
        return x + np.random.normal()

    def draw_a_number(self, x):
        return x + random.random()


CASES = {
    "count": "        self.num_steps += 1",
    "append": "        self.losses.append(x * 2)",
    "append_logs": '        self.losses.append({"loss": x * 2, "step": 1})',
    "draw_a_number": "        return x + random.random()",
    "assign": "        self.last = x",
    "assign_new": "        self.never_seen = x",
    "assign_item": "        self.totals[len(self.losses)] = x",
    "add": '        self.totals["loss"] += x',
    "draw": "        return x + np.random.normal()",
}


@pytest.mark.parametrize("as_function", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_side_effect_is_reported_once_with_its_line(strategy, told, name, as_function):
    step = getattr(Trainer(), name)
    call = rx.function(lambda x: strategy.run(step, args=(x,))) if as_function else None
    for _ in range(3):
        strategy.run(step, args=(jnp.ones(2),)) if call is None else call(jnp.ones(2))
    strategy.run(getattr(Trainer(), name), args=(jnp.ones(3),))  # traced again
    (message,) = told()
    assert line_of(CASES[name], step) in message


def test_globals_closures_and_helpers_are_watched(strategy, told):
    history, generator = [], np.random.default_rng(0)

    def keep(x):
        history.append(x)

    def step(x):
        Trainer.num_steps += 1
        keep(x)
        return x + generator.normal()

    strategy.run(step, args=(jnp.ones(2),))
    messages = told()
    lines = [
        line_of("        Trainer.num_steps += 1", step),
        line_of("        return x + generator.normal()", step),
        line_of("        history.append(x)", keep),
    ]
    assert sorted(messages) == sorted(m for line in lines for m in messages if line in m)
    assert len(messages) == 3


class Noise(keras.layers.Layer):
    num_calls = 0

    def call(self, x):
        self.num_calls += 1
        self.last = x  # for the rest of the step
        return x + np.random.normal()


class Called:
    def __call__(self, x):
        return x + np.random.normal()


def test_layers_and_objects_that_a_step_calls_are_watched(strategy, told):
    layer, called = Noise(), Called()

    def step(x):
        return layer(x) + called(x)

    strategy.run(step, args=(jnp.ones(2),))
    messages = told()
    lines = [
        line_of("        self.num_calls += 1", Noise.call),
        line_of("        return x + np.random.normal()", Noise.call),
        line_of("        return x + np.random.normal()", Called.__call__),
    ]
    assert sorted(messages) == sorted(m for line in lines for m in messages if line in m)
    assert len(messages) == 3
    strategy.run(Called(), args=(jnp.ones(2),))  # told already
    assert len(told()) == 3


class Counting(keras.layers.Layer):
    def __init__(self):
        super().__init__()
        self.num_calls = 0

    def call(self, x):
        self.num_calls += 1
        return x + np.random.rand()


@pytest.mark.parametrize("num_replicas", [1, 2])
@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_layers_of_a_model_that_fit_runs_are_watched(num_replicas, method, told):
    with rx.MirroredStrategy(num_replicas).scope():
        model = keras.Sequential([keras.Input((2,)), keras.Sequential([Counting(), keras.layers.Dense(1)])])
        model.compile("sgd", "mse")
    x = np.ones((4, 2), "float32")
    data = (x,) if method == "predict" else (x, x[:, :1])
    for _ in range(2):
        getattr(model, method)(*data, verbose=0)
    assert sorted(told()) == [
        f"{line_of('        self.num_calls += 1', Counting.call)}: `self.num_calls += 1` runs once, while the function is "
        "traced, and not in each step. Count outside of the function, or in an rx.Variable: variable.assign_add(1).",
        f"{line_of('        return x + np.random.rand()', Counting.call)}: `np.random.rand()` draws once, while the function is "
        "traced: all replicas and all steps get the same numbers. Draw outside and pass the numbers as an argument, or use "
        "keras.random with a SeedGenerator, or jax.random with a key.",
    ]


def test_replicas_with_uneven_batches_and_functions_for_several_steps_are_watched(strategy, told):
    trainer = Trainer()
    dataset = strategy.experimental_distribute_dataset(rx.data.from_arrays(np.ones((6, 1))).batch(3))
    strategy.run_steps(trainer.append, iter(dataset), 2)
    (message,) = told()
    assert "self.losses.append" in message


def import_more(name):
    raise ImportError(name)


def harmless(strategy):
    """Code that resembles a mistake, but is none."""
    shapes, seen, limits = [], {"names": set()}, {"largest": 0}
    generator, lazy = np.random.default_rng(0), types.ModuleType("lazy")
    lazy.__getattr__ = import_more
    variable = []
    count = 0

    class Step:
        training = False

    def step(x):
        nonlocal count
        count += 1  # each value is another program
        shapes.append(x.shape)
        seen["names"].add("step")
        limits["largest"] = max(limits["largest"], x.shape[0])
        if not variable:
            variable.append(rx.Variable(np.random.normal(size=2).astype("float32")))
        if Step.training:
            x = x + generator.normal()
        if Step.training: x = x + generator.normal()  # fmt: skip  # noqa: E701
        x = x + (generator.normal() if Step.training else 0.0)
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        x = x + jax.pure_callback(lambda x: generator.normal(size=x.shape).astype("float32"), shape, x)
        if Step.training:
            lazy.absent()
        values = []
        values.append(x)
        scratch = {}
        scratch["x"] = x
        fixed = np.random.RandomState(0).normal(size=2).astype("float32")
        np.random.seed(0)
        return sum(values) + scratch["x"] * fixed + variable[0]

    return step


def test_harmless_code_is_not_reported(strategy, told):
    strategy.run(harmless(strategy), args=(jnp.ones(2),))
    strategy.run(lambda x: x * 2, args=(np.random.normal(size=2),))
    rx.function(lambda x: x * 2)(np.random.normal(size=2))
    assert told() == []


def test_a_debugger_keeps_its_trace_function(strategy, told):
    def look(frame, event, arg):
        return None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        strategy.run(Trainer().draw, args=(jnp.ones(2),))
        assert sys.gettrace() is look
    finally:
        sys.settrace(before)
    strategy.run(Trainer().count, args=(jnp.ones(2),))
    assert sys.gettrace() is before


def test_functions_without_source_run(strategy, told):
    scope = {"losses": []}
    exec("def step(x):\n    losses.append(x)\n    return x", scope)
    strategy.run(scope["step"], args=(jnp.ones(2),))
    assert told() == []


# --- cross-replica code that does nothing -------------------------------------------------------------


def test_a_scope_that_is_not_entered_is_reported_with_its_line(strategy, told):
    strategy.scope()
    (message,) = told()
    assert f"{__file__}:{sys._getframe().f_lineno - 2} in" in message
    scope = strategy.scope()
    with scope, scope:
        pass
    del scope
    assert len(told()) == 1


def test_strategy_itself_is_not_a_context(strategy):
    with pytest.raises(rx.errors.ContextError, match=r"strategy\.scope\(\)"), strategy:
        pass


@pytest.mark.parametrize("combine", ["reduce", "gather"])
def test_result_of_none_raises_with_its_line(strategy, combine):
    result = strategy.run(lambda: None)
    with pytest.raises(rx.errors.ReductionError, match=r"test_side_effects\.py:.* returns nothing"):
        strategy.reduce("SUM", result, axis=None) if combine == "reduce" else strategy.gather(result, 0)


def test_error_about_a_kept_value_names_the_line_that_kept_it(strategy, told, monkeypatch):
    monkeypatch.setattr(side_effects, "_kept", collections.deque())
    trainer = Trainer()

    def note_on(use):
        with pytest.raises(side_effects.OF_TRACER) as caught:
            use()
        side_effects.add_note(caught.value)
        return getattr(caught.value, "__notes__", [""])[-1]

    assert "kept" not in note_on(lambda: jax.jit(float)(1.0))
    strategy.run(trainer.append, args=(jnp.ones(2),))
    for use in (lambda: sum(trainer.losses), lambda: np.abs(trainer.losses[0])):
        note = note_on(use)
        assert (
            f"{line_of('        self.losses.append(x * 2)', trainer.append)}: `self.losses.append(x * 2)`"
            in note
        )
        assert "Return it from the function" in note

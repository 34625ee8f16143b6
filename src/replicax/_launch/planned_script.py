"""Runs a script in the process of ``replicax plan``, and plans its first program instead of running it.

It replaces methods of strategies, functions and Keras models in this process only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import runpy
import sys
import traceback
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import jax

from replicax._launch.planned_clusters import replace_method, stand_in_for_clusters
from replicax._plan.planning import plan_of
from replicax._src.devices.ahead_of_time import check_compiler
from replicax._src.devices.hardware import hardware_of
from replicax._src.devices.plan import Plan
from replicax._src.functions.function import Function
from replicax._src.input.dataset import DistributedIterator
from replicax._src.scope import context
from replicax._src.strategies.lower_method import StepToLower
from replicax._src.strategies.strategy import Strategy
from replicax._src.tracing.capture import current_capture
from replicax._src.user.tracebacks import shorten
from replicax._src.user.user_code import UNKNOWN, user_line_of
from replicax._src.values.framework import use_imported
from replicax._src.vocabulary.errors import PlanError, ReplicaxError, UnsupportedError
from replicax._src.vocabulary.options import RunOptions

_LOOPS = ("fit", "train_on_batch", "evaluate", "test_on_batch", "predict", "predict_on_batch")


class _Planned(BaseException):
    """Leaves the script once its first program is planned. A BaseException, so that `except Exception` does not catch
    it.
    """

    def __init__(self, plan: Plan):
        self.plan = plan


class _FirstProgram:
    """Plans the first program of the script."""

    def __init__(self, asked: dict[str, Any], tell: Callable[[str, Plan | None], None]):
        self._asked, self._tell = asked, tell
        self._strategies: list[Strategy] = []
        self._is_planning = False
        # The plain arrays that datasets yield to a single replica, by id.
        self._components: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()

    def install(self) -> None:
        """Replaces the methods that run programs."""
        replace_method(Strategy, "__init__", self._init)
        replace_method(Strategy, "run", self._run)
        replace_method(Strategy, "run_steps", self._run_steps)
        replace_method(Function, "__call__", self._call)
        replace_method(DistributedIterator, "__next__", self._next)
        if importlib.util.find_spec("keras") is not None:
            self._install_keras()

    def _install_keras(self) -> None:
        import keras

        from replicax._src.keras import unallocated_variables

        use_imported()
        for name in _LOOPS:
            replace_method(keras.Model, name, functools.partial(self._loop, name=name))
        replace_method(keras.Variable, "__init__", unallocated_variables.make)
        replace_method(keras.Variable, "_deferred_initialize", unallocated_variables.initialize)

    def _plan(self, strategy: Strategy, fn: Any, args: Any, kwargs: Any = None, options: Any = None) -> None:
        context.check_may_enter(strategy)
        use_imported()
        args, kwargs = jax.tree_util.tree_map(self._described, (args, kwargs or {}), is_leaf=_is_item)
        step = StepToLower(fn, args, kwargs, options or RunOptions(), self._asked["global_batch"])
        limit_s = self._asked["remedy_limit_s"]
        self._is_planning = True
        try:
            plan = plan_of(strategy, step, self._asked["topology"], limit_s, self._tell)
        finally:
            self._is_planning = False
        raise _Planned(plan)

    def _described(self, leaf: Any) -> Any:
        """Returns an array as one replica's component, if a dataset has yielded it."""
        if isinstance(leaf, jax.Array) and self._components.get(id(leaf)) is leaf:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
        return leaf

    def _init(self, original: Any, strategy: Strategy, *args: Any, **kwargs: Any) -> None:
        original(strategy, *args, **kwargs)
        if not strategy.is_default:  # the default strategy is created on first use
            self._strategies.append(strategy)

    def _run(
        self,
        original: Any,
        strategy: Strategy,
        fn: Any,
        args: Any = (),
        kwargs: Any = None,
        options: Any = None,
    ) -> Any:
        if self._is_inside():
            return original(strategy, fn, args, kwargs, options)
        return self._plan(strategy, fn, args, kwargs, options)

    def _run_steps(
        self, original: Any, strategy: Strategy, fn: Any, iterator: Any, steps: int, state: Any = None
    ) -> Any:
        del original, steps
        batch = next(iterator)
        return self._plan(strategy, fn, (batch,) if state is None else (state, batch))

    def _call(self, original: Any, function: Function, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside():
            return original(function, *args, **kwargs)
        try:
            return self._plan(self._strategy(), function, args, kwargs)
        except UnsupportedError:
            if not function.runs_as_python:
                raise
        return original(function, *args, **kwargs)  # the first strategy.run in it is planned

    def _loop(self, original: Any, model: Any, *args: Any, name: str, **kwargs: Any) -> Any:
        if self._is_inside():
            return original(model, *args, **kwargs)
        return self._plan(context.owner_of(model) or self._strategy(), getattr(model, name), args, kwargs)

    def _next(self, original: Any, iterator: Any) -> Any:
        element = original(iterator)
        for leaf in jax.tree_util.tree_leaves(element):
            if isinstance(leaf, jax.Array):  # from one replica; several give a PerReplica
                self._components[id(leaf)] = leaf
        return element

    def _is_inside(self) -> bool:
        """True in a program that is planned, or run by another."""
        return self._is_planning or current_capture() is not None or context.in_replica_function()

    def _strategy(self) -> Strategy:
        """Returns the strategy of the current scope, or the strategy that the script created last."""
        if context.has_strategy():
            return context.get_strategy()
        return self._strategies[-1] if self._strategies else context.get_strategy()


def _is_item(value: Any) -> bool:
    """Returns True except for the pytrees that datasets yield. Modules are pytrees too, and must keep their
    identity.
    """
    return not (isinstance(value, (tuple, list, dict)) or dataclasses.is_dataclass(value))


def _heard(result: Path, text: str, plan: Plan | None) -> None:
    """Reports the progress. Writes a plan before its remedies are computed, which may exceed the time limit."""
    _say(text)
    if plan is not None:
        _write(result, plan)


def _write(result: Path, plan: Plan) -> None:
    found = {"facts": plan.to_dict(), "text": str(plan), "svg": plan.to_svg()}
    whole = result.with_suffix(".whole")
    whole.write_text(json.dumps(found), encoding="utf-8")
    whole.replace(result)


def main() -> int:
    """Runs the script on the command line, and writes the plan to a file. Returns the exit code."""
    asked, script = json.loads(sys.argv[1]), sys.argv[2]
    sys.argv = sys.argv[2:]
    is_module = asked.pop("is_module")
    sys.path[0] = os.getcwd() if is_module else os.path.dirname(os.path.abspath(script))  # as Python sets it
    result = Path(asked.pop("result"))
    _FirstProgram(asked, functools.partial(_heard, result)).install()
    stand_in_for_clusters(asked["topology"], _say)
    try:
        check_compiler(
            hardware_of(asked["topology"])
        )  # checked before the script takes minutes to reach its first program
        if is_module:
            runpy.run_module(script, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(script, run_name="__main__")
    except _Planned as planned:
        _write(result, planned.plan)
        return 0
    except ReplicaxError as error:
        line = user_line_of(error)
        _say(f"{type(error).__name__}: {error}" + ("" if line == UNKNOWN else f" (at {line})"))
    except SystemExit as end:
        if not result.exists():
            _say_end(end, script)
    except Exception as error:
        shorten(error)
        traceback.print_exception(error)
        _say(f"there is no plan: {script} failed before its first program was compiled.")
    else:
        if not result.exists():
            told = "it called no strategy.run, no rx.function and no fit"
            _say(str(PlanError(f"{script} ended without a program: {told}.")))
    return 0 if result.exists() else 1  # a plan may exist if the script caught _Planned


def _say(text: str) -> None:
    print(f"replicax plan: {text}", file=sys.stderr, flush=True)


def _say_end(end: SystemExit, script: str) -> None:
    if end.code is not None and not isinstance(end.code, int):
        print(end.code, file=sys.stderr)  # as Python would
    _say(f"there is no plan: {script} ended itself (sys.exit) before its first program.")


def run() -> NoReturn:
    """Runs ``main`` and ends this process."""
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the script may have closed the stream
            stream.flush()
    os._exit(code)  # threads of the script's datasets wait for batches that are never read

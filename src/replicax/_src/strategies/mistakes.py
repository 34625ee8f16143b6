"""Checks and errors for wrong uses of a strategy: invalid arguments, unknown names, subclasses."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from replicax._src.scope.any_strategy import AnyStrategy
from replicax._src.tracing.key import name_of, unwrap
from replicax._src.user.listening import listener
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError
from replicax._src.vocabulary.options import RunOptions


def check_arguments(method: str, fn: Any, args: Any, kwargs: Any, options: Any) -> None:
    """Raises for invalid arguments of ``run`` and similar methods.

    Args:
      method: The name for messages, such as ``strategy.run``.

    Raises:
      InvalidArgumentError: ``fn`` is not a function, ``args`` not a list or tuple, ``kwargs`` not a dict, or
        ``options`` not a ``RunOptions`` for these arguments.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{method} needs a function, got {fn!r}.")
    if not isinstance(args, (list, tuple)):
        raise InvalidArgumentError(
            f"positional args must be a list or tuple, got {type(args)}. For one argument write "
            f"{method}(fn, args=(value,))."
        )
    if not isinstance(kwargs, Mapping):
        hint = " Give the hardware by name: topology='v5p:16x16x16'." if isinstance(kwargs, str) else ""
        raise InvalidArgumentError(
            f"kwargs must be a dict of keyword arguments, got {kwargs!r}, a {type(kwargs).__name__}.{hint}"
        )
    if not isinstance(options, RunOptions):
        raise InvalidArgumentError(
            f"options must be an rx.RunOptions, got {options!r}, a {type(options).__name__}."
        )
    if any(not -len(args) <= i < len(args) for i in options.donate_args):
        raise InvalidArgumentError(
            f"RunOptions(donate_args={options.donate_args}) names positions in args, of which there are "
            f"{len(args)}. Give those of the arguments that the program may overwrite."
        )


def check_call(fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Raises if ``fn`` cannot be called with ``args`` and ``kwargs``. Call it after the call has failed.

    Raises:
      InvalidArgumentError: The arguments do not fit the signature of ``fn``.
    """
    fn = unwrap(fn)
    try:
        signature = inspect.signature(fn, follow_wrapped=False)
    except (TypeError, ValueError):  # a built-in function has no signature
        return
    if _fits(signature, args, kwargs):
        return
    given = f"args of length {len(args)}" + (f" and kwargs {list(kwargs)}" if kwargs else "")
    hint = ""
    if _fits(signature, [args], kwargs):
        hint = " For one argument, such as a batch that is a tuple, write strategy.run(fn, args=(value,))."
    raise InvalidArgumentError(
        f"strategy.run cannot call {name_of(fn)}{signature} with {given}. `args` has one entry for each positional "
        f"argument.{hint}"
    ) from None


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True


def no_such_attribute(strategy: AnyStrategy, name: str) -> AttributeError:
    """Returns the error for a public name that a strategy does not have: TensorFlow's, or like one that it has."""
    advice = listener().missing_attribute(strategy, name, "strategy")
    if advice is not None:
        return AttributeError(f"{type(strategy).__name__} has no attribute {name!r}. {advice}", name=name)
    extended = {each: f"extended.{each}" for each in dir(strategy.extended)}
    names = {**extended, **{each: each for each in dir(type(strategy))}}
    close = difflib.get_close_matches(name, [each for each in names if not each.startswith("_")], n=1)
    hint = f" Did you mean strategy.{names[close[0]]}?" if close else ""
    # Without ``obj``, from which Python would add a suggestion of its own.
    return AttributeError(f"{type(strategy).__name__} has no attribute {name!r}.{hint}", name=name)


def no_strategies_of_users(name: str) -> UnsupportedError:
    """Returns the error for a subclass of a strategy, or of its ``extended``, that is written as in TensorFlow."""
    return UnsupportedError(
        f"{name}: strategies cannot be subclassed as in TensorFlow, where a StrategyExtended has their methods. Compose one: "
        "rx.MirroredStrategy(devices, cross_device_ops), with your own rx.CrossDeviceOps; rx.TPUStrategy(layout_map=…) divides "
        "variables; rx.ParameterServerStrategy(variable_partitioner=…) too."
    )

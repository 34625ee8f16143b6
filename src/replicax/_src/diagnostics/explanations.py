"""Errors of JAX in a traced function, and what Keras makes of them, as errors that name the user's line and a remedy.

JAX's errors about tracers cannot be made from a text, as Keras does when it adds a layer's name. What then arrives is
another error, whose context is JAX's. ``tensorflow_code`` explains TensorFlow's code, before this file does.
"""

from __future__ import annotations

import ast
import contextlib
import re
import sys
import types
from collections.abc import Iterator, Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.devices.topology import REPLICA_AXIS
from replicax._src.diagnostics import tensorflow_code
from replicax._src.diagnostics.advice import ops_of_keras
from replicax._src.diagnostics.chosen_devices import replica_chooses
from replicax._src.jax_internals import jax_compat
from replicax._src.tracing.capture import current_capture
from replicax._src.tracing.program import leaked
from replicax._src.user.listening import TRACES, Place
from replicax._src.user.user_code import (
    expression,
    frames_of,
    is_of_package,
    is_user_code,
    user_entry,
    user_line_of,
)
from replicax._src.vocabulary.errors import (
    ReplicaxError,
    TracedConditionError,
    TransformationError,
    UnknownAxisError,
)

_NEEDS_VALUE: Final = (
    jax.errors.ConcretizationTypeError,
    jax.errors.TracerArrayConversionError,
    jax.errors.TracerIntegerConversionError,
)
_EAGERLY: Final = "; or run it with options=rx.RunOptions(eager=True) to debug it with real values"
_EAGERLY_IN_FIT: Final = "; or write model.compile(..., run_eagerly=True) to debug it with real values"
_FITS: Final = ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch")
_CONVERSIONS: Final = ("bool", "complex", "float", "int")
_OF_FIT: Final = (
    "fit, evaluate and predict compute a step for the global batch: a sum or mean over its rows (jnp.sum, jnp.mean) is "
    "over all replicas already. Leave the collective out; a layer that strategy.run calls too has it under "
    "`if rx.get_replica_context() is not None:`."
)
_NO_AXIS: Final = {
    "step": _OF_FIT,
    "fit": _OF_FIT,
    "run": "The axis of the replicas is named {axis!r}: jax.lax.psum(x, {axis!r}). Or write "
    "rx.get_replica_context().all_reduce('SUM', x).",
    "function": "The axis of the replicas, {axis!r}, exists only in functions that strategy.run runs. Call the collective "
    "there, or write strategy.reduce('SUM', value, axis=None) for a result of strategy.run.",
    "scope": "The axis of the replicas, {axis!r}, exists only in functions that strategy.run runs. Keras calls layers "
    "outside of them too, to build a model: put the collective under `if rx.get_replica_context() is not None:`.",
}


@contextlib.contextmanager
def explained(place: Place) -> Iterator[None]:
    """Context that replaces errors about tracers and axes by typed ones.

    Args:
      place: In a scope only errors that Keras has changed are replaced, and those about the axis of the replicas. In
        eager mode only those of TensorFlow are, because values are no tracers.

    Raises:
      TracedConditionError: Python or NumPy needs the number of a traced value.
      TraceError: The code uses a tracer of another trace.
      UnknownAxisError: A collective is over an axis that does not exist.
      UnsupportedError: TensorFlow computes in the function.
      ReplicaxError: An error of replicax that Keras has wrapped.
    """
    try:
        with tensorflow_code.explained(is_in_trace=place in (*TRACES, "eager")):
            yield
    except Exception as error:
        found = None if place == "eager" else explanation_of(error, place)
        if found is None:
            raise
        raise found from None  # one traceback, down to the user's line


def explanation_of(error: BaseException, place: Place) -> ReplicaxError | None:
    """Returns the error to raise in place of ``error``; None if there is nothing to add."""
    if isinstance(error, ReplicaxError):
        return None
    chain = list(_wrapped_by_keras(error))
    for number, each in enumerate(chain):
        if place == "scope" and not number and not jax_compat.names_unknown_axis(each, REPLICA_AXIS):
            continue
        made = each if isinstance(each, ReplicaxError) else _explanation(each, place)
        if made is not None:
            return made.with_traceback(_joined(chain[: number + 1]))
    return None


def _wrapped_by_keras(error: BaseException) -> Iterator[BaseException]:
    """Yields an error, then the error that Keras was handling when it raised this one, and so on.

    Keras removes its frames, so only the text of the error that is wrapped shows that Keras has wrapped it.
    """
    each: BaseException | None = error
    while each is not None:
        yield each
        below = each.__cause__ or each.__context__
        each = below if below is not None and _wraps(each, below) else None


def _wraps(error: BaseException, below: BaseException) -> bool:
    given = getattr(error, "obj", None)  # the text that Keras has given to a class that takes a tracer
    if isinstance(error, AttributeError) and isinstance(given, str):
        return str(below) in given
    return isinstance(error, (RuntimeError, type(below))) and bool(str(below)) and str(below) in str(error)


def _explanation(error: BaseException, place: Place) -> ReplicaxError | None:
    line = user_line_of(error)
    if isinstance(error, _NEEDS_VALUE):
        once = " for all replicas" if place == "run" else ""
        return TracedConditionError(
            f"At {line}{_in_expression(error)} Python needs a value that is known only when the program runs (an argument, "
            "a variable, or replica_id_in_sync_group): an `if`, `while`, int(), float(), or a NumPy function of a value. "
            f"The function is traced once{once}. {_instead_of_value(error, place)}{_eagerly(place)}."
        )
    if isinstance(error, jax.errors.NonConcreteBooleanIndexError):
        return TracedConditionError(
            f"At {line}{_in_expression(error)} an array is indexed by a mask: the number of results is known only when the "
            "program runs, and a program has fixed shapes. Write jnp.where(mask, x, 0.0) and keep all elements; for a sum or "
            "mean of some, jnp.sum(x, where=mask) or jnp.mean(x, where=mask)."
        )
    if isinstance(error, jax.errors.UnexpectedTracerError):
        return leaked(line)
    mapped = _map_that_failed(error) if place == "run" else None
    if mapped is not None:
        return replica_chooses(mapped, line)
    if place != "scope" and _calls(error, jax.set_mesh):
        return TransformationError(
            f"At {line} jax.set_mesh is called in a function that is traced for the devices of a strategy. Leave it out: "
            "the program has its mesh."
        )
    if jax_compat.names_unknown_axis(error, "axis name"):
        advice = _NO_AXIS[place].format(axis=REPLICA_AXIS)
        return UnknownAxisError(
            f"At {line}{_in_expression(error)} a collective of JAX is over an axis that does not exist here. {advice}"
        )
    return None


# --- what the user wrote ------------------------------------------------------------------------------


def _text(error: BaseException) -> str:
    entry = user_entry(error)
    return "" if entry is None else expression(entry.tb_frame, entry.tb_lasti, entry.tb_lineno)


def _in_expression(error: BaseException) -> str:
    text = _text(error)
    return f", in `{tensorflow_code.shortened(text)}`," if text else ","


def _instead_of_value(error: BaseException, place: Place) -> str:
    """Returns the advice on the expression that needs the value: a conversion, a replica's number, any other."""
    text = _text(error)
    if (converted := _converted(text)) is not None:
        return (
            f'Write jax.debug.print("{{}}", {converted}) to print it, or return it from the function and print the result. '
            f"To compute with it write {converted} itself, and jnp.where or rx.cond for a choice"
        )
    if "replica_id_in_sync_group" in text:
        can_return = place == "run" and not _is_in_fit()
        returned = (
            "return the value and print strategy.experimental_local_results(value)[0]; or, in the function, "
        )
        return (
            f"To print the value of one replica, {returned if can_return else ''}write "
            f'rx.cond({" ".join(text.split())}, lambda: jax.debug.print("{{}}", value), lambda: None). For a value of one replica '
            "write jnp.where"
        )
    return (
        f"{_instead(error)}Use jnp.where or jax.lax.select for a value, rx.cond for a branch that assigns variables, "
        "jax.debug.print to print"
    )


def _eagerly(place: Place) -> str:
    """Returns how to run the function with real values, where that is possible."""
    if _is_in_fit():
        return _EAGERLY_IN_FIT
    return _EAGERLY if place == "run" and current_capture() is None else ""


def _is_in_fit() -> bool:
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in _FITS and is_of_package(frame.f_code.co_filename, "keras"):
            return True
        frame = frame.f_back
    return False


def _converted(text: str) -> str | None:
    """Returns the source of x in ``float(x)`` and the like, or in ``x.item()``; None for other expressions."""
    try:
        node = ast.parse(f"(\n{text}\n)", mode="eval").body
    except SyntaxError:
        return None
    if not isinstance(node, ast.Call):
        return None
    if isinstance(node.func, ast.Name) and node.func.id in _CONVERSIONS and len(node.args) == 1:
        return ast.unparse(node.args[0])
    if isinstance(node.func, ast.Attribute) and node.func.attr == "item":
        return ast.unparse(node.func.value)
    return None


def _instead(error: BaseException) -> str:
    """Returns the advice on NumPy in the expression that failed."""
    entry = user_entry(error)
    if entry is None or not isinstance(error, jax.errors.TracerArrayConversionError):
        return ""
    text, scope = _text(error), entry.tb_frame.f_globals
    if _is_operator(text):
        return "A NumPy number on the left asks for it: put the variable or array first, or write float(number). "
    keras_ops = ops_of_keras(scope)
    for path in tensorflow_code.paths_in(text):
        if len(path) == 2 and tensorflow_code.value_of(path[:1], entry.tb_frame) is np:
            name, written = path[1], ".".join(path)
            if keras_ops is not None and callable(getattr(keras_ops, name, None)):
                return f"Write keras.ops.{name} in place of {written}. "
            if callable(getattr(jnp, name, None)):
                return f"Write jnp.{name} (jax.numpy) in place of {written}. "
    return "Functions of jax.numpy and keras.ops need no numbers while they are traced. "


def _named(error: BaseException) -> list[tuple[str, Any]]:
    """Returns the names in the expression that failed, with their objects."""
    entry = user_entry(error)
    if entry is None:
        return []
    paths = tensorflow_code.paths_in(_text(error))
    return [(".".join(path), tensorflow_code.value_of(path, entry.tb_frame)) for path in paths]


def _named_by_caller() -> list[tuple[str, Any]]:
    """Returns the names in the expression that called replicax, with their objects."""
    frame = sys._getframe(1)
    while frame is not None and not is_user_code(frame.f_code.co_filename):
        frame = frame.f_back
    if frame is None:
        return []
    paths = tensorflow_code.paths_in(expression(frame, frame.f_lasti, frame.f_lineno))
    return [(".".join(path), tensorflow_code.value_of(path, frame)) for path in paths]


def _calls(error: BaseException, function: Any) -> bool:
    """Returns True if the expression that failed calls this function."""
    return any(value is function for _, value in _named(error))


def _map_that_failed(error: BaseException) -> str | None:
    """Returns "jax.pmap" or "jax.shard_map" if the expression that failed calls what one of them returns."""
    found = (jax_compat.name_of_map(value) for _, value in _named(error))
    return next((name for name in found if name is not None), None)


def note_on(error: Exception, replica_id: int, rows: Sequence[int] | None) -> str | None:
    """Returns a note that explains an error of a replica function; None if there is nothing to add."""
    if rows is not None and rows[replica_id] == 0:
        return (
            f"(This replica has no rows: the batch has {sum(rows)} rows for {len(rows)} replicas, and this was "
            "the trace for 0 rows. Operations that need a row, such as jnp.max or x[0], fail there.)"
        )
    if (note := _note_on_argument(error)) is not None:
        return note
    if "from different trace level" in str(error):  # flax 0.12
        return (
            "(The function changes or differentiates a flax nnx module that it closes over. Pass modules, optimizers and metrics "
            "of nnx as arguments: strategy.run(step, args=(model, optimizer, batch)).)"
        )
    return None


def _note_on_argument(error: BaseException) -> str | None:
    """Returns a note on an error of JAX about an argument that is a list or tuple of arrays, or that a function of
    ``jax.jit`` does not take; None for other errors.
    """
    if not isinstance(error, TypeError):
        return None
    named = _named(error)
    refused = re.search(r"as an abstract array[^\n]* at path (\w+)", str(error))  # JAX has no type for it
    for name, value in named or _named_by_caller():
        if refused and jax_compat.is_jitted(value):
            return (
                f"({name} is compiled by jax.jit, which takes no such object as an argument. replicax compiles the function "
                f'itself: leave jax.jit out, or write jax.jit(..., static_argnames="{refused[1]}").)'
            )
    if not any(str(getattr(value, "__module__", "")).startswith("jax.") for _, value in named):
        return None
    for name, value in named:
        is_sequence = isinstance(value, (list, tuple)) and len(value) > 0
        if is_sequence and all(isinstance(item, jax.Array | float | int) for item in value):
            return (
                f"({name} is a Python {type(value).__name__} of {len(value)}, which is a pytree and not one array. Pass an "
                f"array to strategy.run, np.asarray({name}); or write jnp.stack({name}).)"
            )
    return None


def _is_operator(text: str) -> bool:
    try:
        return isinstance(ast.parse(f"(\n{text}\n)", mode="eval").body, ast.BinOp)
    except SyntaxError:
        return False


def _joined(chain: list[BaseException]) -> types.TracebackType | None:
    """Returns one traceback for errors of which each wraps the next, down to the user's innermost line."""
    entries = [entry for each in chain for entry in frames_of(each.__traceback__)]
    while entries and not is_user_code(entries[-1].tb_frame.f_code.co_filename):
        entries.pop()
    shown, seen = None, set()
    for entry in reversed(entries):
        if (id(entry.tb_frame), entry.tb_lasti) not in seen:
            seen.add((id(entry.tb_frame), entry.tb_lasti))
            shown = types.TracebackType(shown, entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    return shown

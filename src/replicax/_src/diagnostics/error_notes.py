"""Notes on errors of Python and Keras whose text does not say what to write: a method in a ``with`` statement without
its parentheses, a learning rate that is called as a schedule, and a layer that makes weights or layers in ``call``.
``missing_names.add_note`` adds them.
"""

from __future__ import annotations

import inspect
import os
import re
import types
from typing import Any, Final

from replicax._src.user.user_code import expression, user_entry

_NO_CONTEXT: Final = "'method' object does not support the context manager protocol"
_NOT_CALLABLE: Final = "' object is not callable"
_LATE_STATE: Final = "You cannot add new elements of state"  # Keras's words


def note_on(error: BaseException) -> str | None:
    """Returns the note on an error that the user's code caused; None if there is none."""
    made = None
    if isinstance(error, TypeError):
        made = _of_context if _NO_CONTEXT in str(error) else _of_rate if _NOT_CALLABLE in str(error) else None
    elif isinstance(error, ValueError) and _LATE_STATE in str(error):
        made = _of_layer
    entry = None if made is None else user_entry(error)
    return None if made is None or entry is None else made(entry)


def _of_context(entry: types.TracebackType) -> str | None:
    frame = entry.tb_frame
    source = expression(frame, entry.tb_lasti, entry.tb_lineno)  # Python may give the whole block
    head, _, _ = source.partition(":")
    for shown in re.findall(r"(?<![\w.])[A-Za-z_][\w.]*(?![\w.(])", head):
        name, *path = shown.split(".")
        value = frame.f_locals.get(name, frame.f_globals.get(name))
        for part in path:
            value = inspect.getattr_static(value, part, None)  # runs no code of the user
        if path and isinstance(value, types.FunctionType):
            return f"{shown} is a method. Write its parentheses: with {shown}():"
    return None


def _of_rate(entry: types.TracebackType) -> str | None:
    source = expression(entry.tb_frame, entry.tb_lasti, entry.tb_lineno)
    found = re.match(r"([A-Za-z_][\w.]*\.learning_rate)\(", source)
    if found is None:
        return None
    return (
        f"{found[1]} is a number in Keras 3: the rate of the next step, also with a schedule. Leave the call out: "
        f"float({found[1]})."
    )


def _of_layer(entry: types.TracebackType) -> str:
    code = entry.tb_frame.f_code
    layer: Any = entry.tb_frame.f_locals.get("self")
    where = code.co_name if layer is None else f"{type(layer).__name__}.{code.co_name}()"
    return (
        f"{where} makes a weight or a layer at {os.path.basename(code.co_filename)}:{entry.tb_lineno}, when the layer is already "
        "built. Make weights in build(self, input_shape), such as self.kernel = self.add_weight(...), and layers in "
        f"__init__(), and use them in {code.co_name}(). compute_output_spec() does not help."
    )

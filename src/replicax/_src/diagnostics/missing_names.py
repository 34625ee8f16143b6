"""Names of TensorFlow or Keras 2 that a module or a value does not have: adds the replacement to the AttributeError.

Code that calls TensorFlow itself is the subject of ``tensorflow_code``; ``advice`` writes the sentences. Values and
modules of JAX and Keras raise their own errors, which get a note where they pass through replicax: in functions that it
traces, in ``fit``, and at the end of a scope. Modules and classes of replicax say it in the error. Some other errors of
Python and Keras get a note there too, which ``slips`` writes.
"""

from __future__ import annotations

import contextlib
import dis
import linecache
import re
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from replicax._src.diagnostics import error_notes
from replicax._src.diagnostics.advice import replacement, table, uses_keras
from replicax._src.user.user_code import PACKAGE, expression, ipython_shell, positions, user_entry

# Modules of TensorFlow with the names that users look for in a module of replicax, JAX or Keras.
_MODULES: Final[Mapping[str, Sequence[str]]] = {
    "replicax": ("tf", "tf.distribute", "tf.distribute.experimental"),
    "replicax.checkpoint": ("tf.train",),
    "jax": ("tf", "tf.experimental"),
    "jax.numpy": ("tf", "tf.math", "tf.linalg"),
    "jax.nn": ("tf.nn",),
    "jax.random": ("tf.random",),
    "jax.lax": ("tf", "tf.math", "tf.linalg"),
    "keras.ops": ("tf", "tf.math", "tf.linalg", "tf.nn", "tf.image"),
}
# Classes, by their public names or those of their bases, and the classes of TensorFlow that users take them for.
_CLASSES: Final[Mapping[str, Sequence[str]]] = {
    "Dataset": ("tf.data.Dataset",),
    "Variable": ("tf.Variable",),
    "Model": ("tf.keras.Model",),
    "Optimizer": ("tf.keras.optimizers.Optimizer",),
    "Strategy": ("tf.distribute.Strategy",),
}
_hooks: list[Any] = []
_IMPORT_FROM: Final = dis.opmap["IMPORT_FROM"]
_OF_LAYERS: Final = frozenset({"compiled_loss", "compiled_metrics", "reset_states"})
_KNOWN: Final = frozenset({"jax", "jaxlib", "keras", "numpy", "replicax"})
_ROOTS: Final = {"rx": "replicax", "jnp": "jax.numpy", "np": "numpy"}
_TRACED: Final = (
    "The function is traced, and its values are known only when the program runs: return the value and write this "
    "outside, or print it with jax.debug.print('{}', x)."
)


def in_module(module: str, name: str) -> AttributeError | ImportError:
    """Returns the error for a name that a public module of replicax does not have.

    It is an ImportError in ``from replicax import name``, where Python would drop the text of an AttributeError.
    """
    text = f"module {module!r} has no attribute {name!r}"
    if name.startswith("_"):  # Python and tools look for these
        return AttributeError(text, name=name, obj=sys.modules[module])
    frame = _users_frame()
    rest = "" if frame is None else _rest_of(frame, frame.f_lasti, name)
    scope = {} if frame is None else frame.f_globals
    below = module.removeprefix("replicax")
    homes = _MODULES.get(module, ()) or (
        f"tf{below}",
        f"tf{below}.experimental",
        f"tf.distribute{below}",
        f"tf.distribute.experimental{below}",
    )
    said = _first(homes, name, rest, uses_keras(scope))
    if said is None:
        return AttributeError(text, name=name, obj=sys.modules[module])  # Python adds the most similar name
    if frame is not None and frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM:
        file = getattr(sys.modules[module], "__file__", None)
        text = f"cannot import name {name!r} from {module!r} ({file})"
        alias = " Import it with: import replicax as rx." if re.search(r"\brx\b", said) else ""
        return ImportError(f"{text}. {said}{alias}", name=module, path=file)
    return AttributeError(f"{text}. {said}", name=name)


def in_object(value: Any, name: str, owner: str) -> str | None:
    """Returns the sentence for a name that an object of replicax does not have; None if there is none.

    Args:
      value: The object, or its class.
      name: The name.
      owner: The text for the object, such as ``variable``.
    """
    cls = value if isinstance(value, type) else type(value)
    said = _of_value(owner, name, in_keras=True, members=dir(value))
    return said or _first(_homes_of_class(cls), name, "", in_keras=True)


def add_note(error: BaseException) -> None:
    """Adds to an AttributeError for a name of TensorFlow, and to errors that ``slips`` knows, what to write instead,
    if the user's code caused it.
    """
    each: BaseException | None = error
    while each is not None:
        if isinstance(each, AttributeError):
            note = None if each.obj is None else _note_on(each)
        else:
            note = error_notes.note_on(each)
        if note is not None:
            if note not in getattr(error, "__notes__", ()):
                error.add_note(note)
            return
        each = each.__cause__ or each.__context__


def note_uncaught(*add_notes: Callable[[BaseException], None]) -> None:
    """Adds the note to errors that end the program, a thread or a cell of a notebook too, from now on: outside of
    calls of replicax only the hooks of Python and IPython see them. The hooks that were there before are called with
    the same error.

    Args:
      *add_notes: Other functions that add notes to such errors.
    """
    if _hooks:
        return
    before, before_in_threads = sys.excepthook, threading.excepthook

    def note(error: BaseException | None) -> None:
        for add in (add_note, *add_notes):
            with contextlib.suppress(Exception):  # the error itself must be shown
                if error is not None:
                    add(error)

    def excepthook(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        note(error)
        before(kind, error, trace)

    def excepthook_in_threads(arguments: threading.ExceptHookArgs) -> None:
        note(arguments.exc_value)
        before_in_threads(arguments)

    _hooks.append(excepthook)
    sys.excepthook = excepthook
    threading.excepthook = excepthook_in_threads
    with contextlib.suppress(Exception):  # of another version of IPython
        _note_in_cells(note)


def _note_in_cells(note: Callable[[BaseException], None]) -> None:
    """Adds the notes to errors that end a cell of IPython or a notebook, unless the user has a handler for errors."""
    shell = ipython_shell()
    if shell is None or shell.custom_exceptions:
        return

    def show(shell: Any, kind: Any, error: BaseException, trace: Any, tb_offset: int | None = None) -> None:
        note(error)
        shell.showtraceback((kind, error, trace), tb_offset=tb_offset)

    shell.set_custom_exc((Exception,), show)


def _note_on(error: AttributeError) -> str | None:
    entry, name = user_entry(error), error.name
    if entry is None or name is None:
        return None
    frame, lasti, line = entry.tb_frame, entry.tb_lasti, entry.tb_lineno
    shown = " ".join(expression(frame, lasti, line).split()) or _shown_without_source(error, frame, lasti)
    if not shown.endswith(f".{name}"):  # the error is not of this line
        return None
    rest = _rest_of(frame, lasti, name)
    in_keras = uses_keras(frame.f_globals)
    if isinstance(error.obj, types.ModuleType):
        return _first(_homes_of_module(error.obj.__name__), name, rest, in_keras)
    if not _is_known(error.obj, shown) or (_is_layer(error.obj) and name not in _OF_LAYERS):
        return None
    said = _of_value(shown.removesuffix(f".{name}"), f"{name}{rest}", in_keras)
    said = said or _first(_homes_of_class(type(error.obj)), name, rest, in_keras)
    return said and (f"{said} {_TRACED}" if " np." in said and _is_tracer(error.obj) else said)


def _shown_without_source(error: AttributeError, frame: types.FrameType, instruction: int) -> str:
    """Returns a text for the attribute that an instruction loads, where Python has no source: ``python -c``, a program
    on standard input.
    """
    loaded = next(
        (each.argval for each in dis.get_instructions(frame.f_code) if each.offset == instruction), None
    )
    if loaded != error.name:
        return ""
    owner = error.obj.__name__ if isinstance(error.obj, types.ModuleType) else "value"
    return f"{owner}.{loaded}"


def _is_known(value: Any, shown: str) -> bool:
    """True for a value of a library whose values stand where TensorFlow's stood. A shape is a tuple here."""
    if type(value) is tuple:
        return ".shape." in shown
    return any(base.__module__.partition(".")[0] in _KNOWN for base in type(value).__mro__)


def _is_layer(value: Any) -> bool:
    """True for a layer or a model, whose other attributes are the user's."""
    return any(
        base.__name__ == "Layer" and base.__module__.startswith("keras") for base in type(value).__mro__
    )


def _is_tracer(value: Any) -> bool:
    return any(base.__name__ == "Tracer" for base in type(value).__mro__)


# --- sentences -----------------------------------------------------------------------------------------------


def _of_value(owner: str, path: str, in_keras: bool, members: Sequence[str] | None = None) -> str | None:
    """Returns the sentence for a method or attribute of any value, such as ``.numpy``.

    Args:
      owner: The source of the value.
      path: The name and what follows it: ``compiled_metrics.update_state``.
      in_keras: True if the module uses Keras.
      members: The names that the value has. Replacements that need another are left out; None keeps all.
    """
    names = table()
    if names is None:
        return None
    for length in range(path.count(".") + 1, 0, -1):
        name = ".".join(path.split(".")[:length])
        inner = f".{owner.rpartition('.')[2]}.{name}"  # `x.shape.ndims` is `.shape.ndims`
        found = names.find(inner) or names.find(f".{name}")
        if found is None or found.rest:
            continue
        row = found.rows[0]
        called = f"{owner}.{name}" + "()" * row.is_call
        template = row.template(keras=in_keras)
        if members is not None and not _members_in(template).issubset(members):
            continue
        if template:
            given = {"self": owner}
            written = names.PLACEHOLDER.sub(
                lambda match, known=given: known.get(match[2], match[2]), template
            )
            written = re.sub(r"(?<![\w.])ops\.", "keras.ops.", written)
            return f"Write {written} in place of {called}."
        if row.write:
            return f"For {called}: {row.write}."
    return None


def _members_in(template: str) -> set[str]:
    """Returns what a template takes of ``{self}``: ``learning_rate`` of ``{self}.learning_rate``."""
    uses = re.finditer(r"\{self\}\.(\w+)|\{self\}\[|asarray\(\{self\}", template)
    return {use[1] or ("__getitem__" if use[0].endswith("[") else "__array__") for use in uses}


def _first(homes: Sequence[str], name: str, rest: str, in_keras: bool) -> str | None:
    """Returns the sentence for the longest name that the table knows below one of some modules or classes."""
    for path in dict.fromkeys((f"{name}{rest}", name)):
        for home in homes:
            if (said := _of_name(f"{home}.{path}", in_keras)) is not None:
                return said
    return None


def _of_name(name: str, in_keras: bool) -> str | None:
    names = table()
    found = names and names.find(name)
    if found is None:
        return None
    if found.rest:  # the table has only a module or class above it
        target = names.target_of(name, keras=in_keras)
        return replacement(name, in_keras) if target and _exists(target) else None
    row = found.rows[0]
    if row.kind == "keep" and row.note:
        note = row.note.replace("`", "")
        return (
            f"{name} stays TensorFlow's, or write {note[3:]}."
            if note.startswith("or ")
            else f"{name} {note}."
        )
    return replacement(name, in_keras)


def _exists(target: str) -> bool:
    """True if a dotted name such as ``keras.losses.Huber`` exists, as far as its modules are imported."""
    root, *path = target.split(".")
    value: Any = sys.modules.get(_ROOTS.get(root, root))
    for i, part in enumerate(path):
        if part not in dir(value):
            return False
        if i < len(path) - 1:
            value = vars(value).get(part)
    return value is not None


def _homes_of_module(module: str) -> tuple[str, ...]:
    module = module.replace(".api", "").replace("._tf_keras", "").replace("keras.keras", "keras")
    known = tuple(_MODULES.get(module, ()))
    return (*known, f"tf.{module}") if module.partition(".")[0] == "keras" else known


def _homes_of_class(cls: type) -> tuple[str, ...]:
    bases = [base.__name__ for base in cls.__mro__ if base.__module__.partition(".")[0] in _KNOWN]
    return tuple(home for base in bases for home in _CLASSES.get(base, ()))


# --- source --------------------------------------------------------------------------------------------------


def _users_frame() -> types.FrameType | None:
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return frame


def _rest_of(frame: types.FrameType, instruction: int, name: str) -> str:
    """Returns what follows an attribute that is missing: ``.NONE`` in ``keras.losses.Reduction.NONE``."""
    if not expression(frame, instruction, frame.f_lineno).endswith(f".{name}"):
        return ""  # `getattr`
    _, last, _, stop = positions(frame.f_code, instruction)
    if last is None or stop is None:
        return ""
    line = linecache.getline(frame.f_code.co_filename, last, frame.f_globals)
    found = re.match(r"(?:\.[A-Za-z_]\w*)+", line.encode()[stop:].decode())
    return "" if found is None else found[0]

"""What Keras 3 renamed, whatever it runs on: arguments, methods, and files, which end in ``.keras`` or ``.weights.h5``.

Names below ``tf.keras``, and methods of objects such as ``metric.reset_states()``, are rows of the table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final

import libcst as cst

from replicax._src.migrate.bindings import Source
from replicax._src.migrate.imports import is_below

# Names of the table -> keywords of calls of these, and of what is below them.
_OF_OPTIMIZERS: Final = {"lr": "learning_rate"}
_KEYWORDS: Final = MappingProxyType({"tf.keras.optimizers": _OF_OPTIMIZERS, "tf.optimizers": _OF_OPTIMIZERS})
# Methods that Keras calls -> their names in Keras 3.
_METHODS: Final = MappingProxyType({"reset_states": "reset_state"})
_MODELS: Final = (".keras", ".h5", ".hdf5")
_WEIGHTS: Final = (".weights.h5",)
_LOADS: Final = ("tf.keras.models.load_model", "tf.keras.saving.load_model")
_CHECKPOINT: Final = "tf.keras.callbacks.ModelCheckpoint"


@final
@dataclass(frozen=True)
class Renamed:
    """A keyword or a method's name, or the path of a file, that has another one in Keras 3.

    Attributes:
      node: It.
      text: What it becomes.
    """

    node: cst.BaseExpression
    text: str


def renamed(source: Source) -> Iterator[Renamed]:
    """Yields the keywords and the methods of the program's own classes that have another name in Keras 3."""
    for call in source.calls:
        name = source.dotted(call.func)
        for above, keywords in _KEYWORDS.items():
            if is_below(name, above):
                for keyword in (argument.keyword for argument in call.args if argument.keyword):
                    if keyword.value in keywords:
                        yield Renamed(keyword, keywords[keyword.value])
    for class_ in source.classes:
        if any(is_below(base, "tf.keras") for base in source.bases(class_)):
            for method in class_.body.body:
                if isinstance(method, cst.FunctionDef) and method.name.value in _METHODS:
                    yield Renamed(method.name, _METHODS[method.name.value])


def is_optimizer(source: Source, node: cst.BaseExpression) -> bool:
    """Returns True for ``model.optimizer``, and for what is made as an optimizer of Keras: its ``lr`` is renamed."""
    if isinstance(node, cst.Attribute) and node.attr.value == "optimizer":
        return True
    made = (value.func for value in source.values(node) if isinstance(value, cst.Call))
    return any(is_below(source.dotted(function), "tf.keras.optimizers") for function in made)


@final
@dataclass(frozen=True)
class Suffixed:
    """A call that gives a model or weights a file.

    Attributes:
      call: It.
      path: The expression of the path that changes; None if nothing does.
      text: What it becomes.
      suffixes: One of these it must end with.
      is_known: False if it cannot be read how the path ends.
    """

    call: cst.Call
    path: cst.BaseExpression | None
    text: str
    suffixes: tuple[str, ...]
    is_known: bool


def suffixed_calls(source: Source) -> Iterator[Suffixed]:
    """Yields the calls that give a model or weights a file's name, unless the name is right already."""
    for call in source.calls:
        suffixes = _suffixes(source, call)
        path = _argument(call, "filepath") if suffixes else None
        if path is None:
            continue
        ending = _ending(source, path)
        if ending is None:
            yield Suffixed(call, None, "", suffixes, is_known=False)
        elif not ending.raw_value.endswith(suffixes):
            yield Suffixed(call, *_with_suffix(source, path, ending, suffixes[0]), suffixes, is_known=True)


def _suffixes(source: Source, call: cst.Call) -> tuple[str, ...]:
    name = source.dotted(call.func)
    if name == _CHECKPOINT:
        only = _argument(call, "save_weights_only", place=None)
        return _WEIGHTS if isinstance(only, cst.Name) and only.value == "True" else _MODELS
    if name in _LOADS:
        return _MODELS
    if not isinstance(call.func, cst.Attribute) or source.full_name(call.func):
        return ()
    if call.func.attr.value in ("save_weights", "load_weights"):
        return () if source.definition(call.func) else _WEIGHTS
    return _MODELS if call.func.attr.value == "save" and _is_of_keras(source, call.func.value) else ()


def _argument(call: cst.Call, name: str, place: int | None = 0) -> cst.BaseExpression | None:
    for number, argument in enumerate(call.args):
        keyword = argument.keyword.value if argument.keyword else None
        if not argument.star and (keyword == name or (keyword is None and number == place)):
            return argument.value
    return None


def _is_of_keras(source: Source, node: cst.BaseExpression, depth: int = 5) -> bool:
    """True for what is made by Keras, a class below one of Keras, or a function that returns such."""
    if depth == 0:
        return False
    if isinstance(node, cst.Call):
        if is_below(source.dotted(node.func), "tf.keras"):
            return True
        made = source.definition(node.func)
        if made is None:
            return False
        if isinstance(made.node, cst.ClassDef):
            return any(is_below(base, "tf.keras") for base in made.source.bases(made.node))
        returned = (
            statement.value
            for statement in made.source.statements
            if isinstance(statement, cst.Return) and made.source.owners[statement] is made.node
        )
        return any(_is_of_keras(made.source, value, depth - 1) for value in returned if value is not None)
    return any(_is_of_keras(source, value, depth - 1) for value in source.values(node))


def _ending(source: Source, path: cst.BaseExpression, depth: int = 5) -> cst.SimpleString | None:
    """The literal with which a path ends: of ``"x"``, ``a + "x"``, ``os.path.join(a, "x")``, ``"x".format(a)``, a
    name.
    """
    if isinstance(path, cst.SimpleString):
        return path
    if depth == 0:
        return None
    if isinstance(path, cst.BinaryOperation):
        return _ending(source, path.right, depth - 1)
    if isinstance(path, cst.Call) and source.full_name(path.func) == "os.path.join" and path.args:
        return _ending(source, path.args[-1].value, depth - 1)
    if (
        isinstance(path, cst.Call)
        and isinstance(path.func, cst.Attribute)
        and path.func.attr.value == "format"
    ):
        return _ending(source, path.func.value, depth - 1)
    if isinstance(path, cst.Name) and source.is_bound(path):
        endings = [_ending(source, value, depth - 1) for value in source.values_of(path)]
        known = [ending for ending in endings if ending is not None]
        same = len(known) == len(endings) and len({ending.raw_value[-4:] for ending in known}) == 1
        return known[0] if same else None
    return None


def _with_suffix(
    source: Source, path: cst.BaseExpression, ending: cst.SimpleString, suffix: str
) -> tuple[cst.BaseExpression, str]:
    """The expression to replace and its text: the literal, if it is part of the path; else the path, with a suffix
    added.
    """
    is_part = ending is path or path in source.around(ending)
    if not is_part:
        return path, f'{source.tree.code_for_node(path)} + "{suffix}"'
    old = ending.raw_value.rstrip("/")
    stem = old.removesuffix(".h5") if suffix.endswith(".h5") else old
    return ending, f"{ending.prefix}{ending.quote}{stem}{suffix}{ending.quote}"

"""Names that Keras 3 has changed on every backend: methods, and files, which end in ``.keras`` or ``.weights.h5``.

Names below ``tf.keras``, and methods of objects such as ``metric.reset_states()``, are rows of the table.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Set
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, final
from weakref import WeakKeyDictionary

import libcst as cst

from replicax._migrate.imports import is_below
from replicax._migrate.name_bindings import ParsedModule, canonical, parts_of, text_of

# Methods that Keras calls -> their names in Keras 3.
_METHODS: Final = MappingProxyType({"reset_states": "reset_state"})
_MODELS: Final = (".keras", ".h5", ".hdf5")
_WEIGHTS: Final = (".weights.h5",)
_LOADS: Final = ("tf.keras.models.load_model", "tf.keras.saving.load_model")
_LOOKS_AT_FILES: Final = re.compile(
    r"os\.(path\.(exists|isfile|isdir|getsize|getmtime)|remove|unlink|rename|replace|listdir|stat)|open"
    r"|(shutil|glob|pathlib|tensorflow\.io\.gfile)\.\w+"
)
_FUNCTIONAL: Final = ("tf.keras.Model", "tf.keras.models.Model")
_SEQUENTIAL: Final = ("tf.keras.Sequential", "tf.keras.models.Sequential")
# Classes below these find the variables in their attributes.
_WITH_VARIABLES: Final = ("tf.keras.layers", "tf.keras.metrics", *_FUNCTIONAL, *_SEQUENTIAL)
# Methods of models that take the data alone in TensorFlow.
_STEPS: Final = ("train_step", "test_step", "predict_step")
_CHECKPOINT: Final = "tf.keras.callbacks.ModelCheckpoint"


@final
@dataclass(frozen=True)
class Renamed:
    """The name of a method that differs in Keras 3.

    Attributes:
      node: The node.
      text: Its replacement.
    """

    node: cst.BaseExpression
    text: str


def renamed(source: ParsedModule) -> Iterator[Renamed]:
    """Yields the methods of the program's own classes that have another name in Keras 3."""
    for call in source.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in _METHODS:
            own = source.definition(call.func)
            class_of = own.source.class_around(own.node) if own else None
            if own and class_of and is_below_keras(own.source, class_of):
                yield Renamed(call.func.attr, _METHODS[call.func.attr.value])
    for class_ in source.classes:
        if is_below_keras(source, class_):
            for method in class_.body.body:
                if isinstance(method, cst.FunctionDef) and method.name.value in _METHODS:
                    yield Renamed(method.name, _METHODS[method.name.value])


def is_below_keras(source: ParsedModule, class_: cst.ClassDef) -> bool:
    """True for a class below one of Keras."""
    return any(is_below(base, "tf.keras") for base in source.bases(class_))


def steps_of_tensorflow(source: ParsedModule) -> Iterator[cst.FunctionDef]:
    """Yields the steps of the module's own models in TensorFlow's style, ``train_step(self, data)``.

    Keras on JAX gives a step its state, too.
    """
    if not any(canonical(bound.origin) for bound in source.bounds):
        return
    for class_ in source.classes:
        if not any(is_below(base, *_FUNCTIONAL, *_SEQUENTIAL) for base in source.bases(class_)):
            continue
        for method in class_.body.body:
            if (
                isinstance(method, cst.FunctionDef)
                and method.name.value in _STEPS
                and len(method.params.params) == 2
                and not isinstance(method.params.star_arg, cst.Param)
                and not method.decorators
            ):
                yield method


def is_in_layer(source: ParsedModule, node: cst.CSTNode) -> bool:
    """True in a class of the program that is a layer, a model or a metric of Keras."""
    around = source.class_around(node)
    return around is not None and any(is_below(base, *_WITH_VARIABLES) for base in source.bases(around))


def is_model(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for an object made as a model of Keras, and for one that the program compiles or fits."""
    made = (value.func for value in source.values(node) if isinstance(value, cst.Call))
    return is_of_keras_by_use(source, node) or any(
        source.dotted(function) in _FUNCTIONAL + _SEQUENTIAL for function in made
    )


def is_optimizer(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for ``model.optimizer``, and for an object made as an optimizer of Keras. Its ``lr`` is renamed."""
    if isinstance(node, cst.Attribute) and node.attr.value == "optimizer":
        return True
    made = (value.func for value in source.values(node) if isinstance(value, cst.Call))
    return any(is_below(source.dotted(function), "tf.keras.optimizers") for function in made)


def is_trained_by_keras(source: ParsedModule, call: cst.Call) -> bool:
    """True for a ``tf.Variable`` that may be in the list of an optimizer of Keras: trainable, and no integer.

    Keras's optimizers need variables of Keras. In a program whose optimizers train only what models of Keras have,
    the other variables are counters and averages.
    """
    first = call.args[0].value if call.args else None
    keywords = {argument.keyword.value for argument in call.args if argument.keyword}
    if isinstance(first, cst.Integer) or keywords & {"trainable", "aggregation", "synchronization", "shape"}:
        return False
    return any(
        not _are_of_model(each, variables) for each in source.program.sources for variables in _trained(each)
    )


def _trained(source: ParsedModule) -> Iterator[cst.BaseExpression]:
    """Yields the lists of variables that optimizers are given."""
    for call in source.calls:
        if not isinstance(call.func, cst.Attribute) or not call.args:
            continue
        pairs = call.args[0].value
        if call.func.attr.value == "minimize" and len(call.args) > 1:
            yield call.args[1].value
        elif call.func.attr.value == "apply_gradients":
            inner = [pairs, *(a.value for a in pairs.args[:1])] if isinstance(pairs, cst.Call) else [pairs]
            zipped = [it for it in inner if isinstance(it, cst.Call) and text_of(it.func) == "zip"]
            yield zipped[0].args[1].value if zipped and len(zipped[0].args) == 2 else pairs


def _are_of_model(source: ParsedModule, variables: cst.BaseExpression) -> bool:
    """True for the variables of a model of Keras, also by a name."""
    found = [variables, *source.values(variables)]
    return any(
        isinstance(value, cst.Attribute)
        and value.attr.value in ("trainable_variables", "trainable_weights")
        and (is_model(source, value.value) or (text_of(value.value) == "self" and is_in_layer(source, value)))
        for value in found
    )


def data_model(source: ParsedModule, call: cst.Call, is_data: Callable[[cst.CSTNode], bool]) -> str | None:
    """Returns the replacement for a Keras model that only functions of datasets call.

    Keras on JAX converts a model's inputs to JAX arrays, which cannot be in a dataset's graph.

    Returns:
      The name to call; "" if datasets call the model and there is no replacement; None for any other call.
    """
    name = source.dotted(call.func)
    statement = source.parents[call]
    if name not in _FUNCTIONAL + _SEQUENTIAL or not isinstance(statement, cst.Assign):
        return None
    (target, *more) = statement.targets
    if more or not isinstance(target.target, cst.Name) or not call.args:
        return None
    is_imported = any(
        bound.name == target.target.value
        for other in source.program.sources
        if other is not source
        for bound in other.bounds
    )
    uses = [chain for chain in source.chains if source.value_of(parts_of(chain)[0]) is call]
    called = [isinstance(source.parents[use], cst.Call | cst.Arg) and is_data(use) for use in uses]
    if not any(called):
        return None
    if is_imported or not all(called):
        return ""
    if name in _FUNCTIONAL:
        return "rx.keras.DataModel"
    layers = call.args[0].value
    elements = [element.value for element in layers.elements] if isinstance(layers, cst.List) else []
    made = [source.dotted(element.func) for element in elements if isinstance(element, cst.Call)]
    is_plain = (
        elements and len(made) == len(elements) and not any("Input" in (each or "Input") for each in made)
    )
    return "keras.layers.Pipeline" if is_plain else ""


@final
@dataclass(frozen=True)
class Suffixed:
    """A call that gives a model or weights a file.

    Attributes:
      call: The call.
      path: The literal or the expression that changes.
      text: The replacement of a literal; "" for an expression.
      template: The replacement of an expression, with {self} for the expression itself.
      suffixes: The path must end with one of these.
      others: Other places where the program names the same file.
    """

    call: cst.Call
    path: cst.BaseExpression
    text: str
    template: str
    suffixes: tuple[str, ...]
    others: tuple[cst.CSTNode, ...]


def suffixed_calls(source: ParsedModule, *, uses_keras: bool) -> Iterator[Suffixed]:
    """Yields the calls that give a model or weights a file name, unless the name is right already.

    In a file without names of Keras, these are calls on models that another file makes.
    """
    given: list[tuple[cst.Call, cst.BaseExpression, tuple[str, ...]]] = []
    for call in source.calls:
        suffixes = _suffixes(source, call)
        if (
            not uses_keras
            and isinstance(call.func, cst.Attribute)
            and not is_of_keras(source, call.func.value)
        ):
            continue
        path = _argument(call, "filepath") if suffixes else None
        if path is not None and not _is_given_suffix(source, path):
            given.append((call, path, suffixes))
    paths = {path for _, path, _ in given}
    for call, path, suffixes in given:
        ending = _ending(source, path)
        if ending is None:
            at_run_time = (
                "rx.keras.weights_path({self})" if suffixes is _WEIGHTS else "rx.keras.model_path({self})"
            )
            yield Suffixed(call, path, "", at_run_time, suffixes, tuple(_other_uses(source, path, paths)))
        elif not ending.raw_value.endswith(suffixes):
            changed = _with_suffix(source, path, ending, suffixes[0])
            yield Suffixed(call, *changed, suffixes, tuple(_other_uses(source, path, paths)))


def _is_given_suffix(source: ParsedModule, path: cst.BaseExpression, depth: int = 5) -> bool:
    """True for the result of ``rx.keras.model_path`` or ``weights_path``, and for names of it."""
    if isinstance(path, cst.Call):
        return source.full_name(path.func) in ("replicax.keras.model_path", "replicax.keras.weights_path")
    if depth == 0 or not isinstance(path, cst.Name) or not source.is_bound(path):
        return False
    values = list(source.values_of(path))
    return bool(values) and all(_is_given_suffix(source, value, depth - 1) for value in values)


def _other_uses(
    source: ParsedModule, path: cst.BaseExpression, paths: Set[cst.BaseExpression]
) -> Iterator[cst.CSTNode]:
    """Yields calls that look at files, such as ``os.path.exists``, with the same name or the same text."""
    if source not in _LOOKING:
        names = ((call, source.full_name(call.func) or text_of(call.func)) for call in source.calls)
        _LOOKING[source] = [call for call, name in names if _LOOKS_AT_FILES.fullmatch(name)]
    for call in _LOOKING[source]:
        for argument in (argument.value for argument in call.args):
            if argument not in paths and argument.deep_equals(path) and call.func is not path:
                yield call


def _suffixes(source: ParsedModule, call: cst.Call) -> tuple[str, ...]:
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
    return _MODELS if call.func.attr.value == "save" and is_of_keras(source, call.func.value) else ()


def _argument(call: cst.Call, name: str, place: int | None = 0) -> cst.BaseExpression | None:
    for number, argument in enumerate(call.args):
        keyword = argument.keyword.value if argument.keyword else None
        if not argument.star and (keyword == name or (keyword is None and number == place)):
            return argument.value
    return None


# The calls of a module that look at files.
_LOOKING: Final[WeakKeyDictionary[ParsedModule, list[cst.Call]]] = WeakKeyDictionary()
# The answers of ``is_of_keras`` by variable, and the texts of the objects that a module compiles or fits.
_OF_KERAS: Final[WeakKeyDictionary[ParsedModule, dict[Hashable, bool]]] = WeakKeyDictionary()
_TRAINED: Final[WeakKeyDictionary[ParsedModule, frozenset[str]]] = WeakKeyDictionary()


def is_of_keras(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for an object made by Keras, by a class below one of Keras, or by a function that returns such an object.

    Visits each variable and expression that the object may come from once: in ``x = f(x)`` there are as many as lines.
    """
    known = _OF_KERAS.setdefault(source, {})
    start = source.variable(node)
    if start not in known:
        known[start] = _comes_from_keras(source, node)
    return known[start]


def _comes_from_keras(source: ParsedModule, node: cst.BaseExpression) -> bool:
    seen = {source.variable(node)}
    waiting = [(source, node)]
    while waiting:
        home, value = waiting.pop()
        if _is_made_by_keras(home, value) or is_of_keras_by_use(home, value):
            return True
        for where, origin in _origins(home, value):
            if where.variable(origin) not in seen:
                seen.add(where.variable(origin))
                waiting.append((where, origin))
    return False


def _is_made_by_keras(source: ParsedModule, node: cst.BaseExpression) -> bool:
    if not isinstance(node, cst.Call):
        return False
    made = source.definition(node.func)
    is_class = made is not None and isinstance(made.node, cst.ClassDef)
    return is_below(source.dotted(node.func), "tf.keras") or (
        is_class and is_below_keras(made.source, made.node)  # type: ignore[union-attr,arg-type]
    )


def _origins(
    source: ParsedModule, node: cst.BaseExpression
) -> Iterator[tuple[ParsedModule, cst.BaseExpression]]:
    """Yields what a function of the program returns, or what a name or an attribute is assigned."""
    if not isinstance(node, cst.Call):
        yield from ((source, value) for value in source.values(node))
        return
    made = source.definition(node.func)
    if made is not None and not isinstance(made.node, cst.ClassDef):
        for statement in made.source.statements:
            is_return = isinstance(statement, cst.Return) and made.source.owners[statement] is made.node
            if is_return and statement.value is not None:  # type: ignore[attr-defined]
                yield made.source, statement.value  # type: ignore[attr-defined]


def is_of_keras_by_use(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for an object that a program compiles, or fits for a number of epochs."""
    if source not in _TRAINED:
        _TRAINED[source] = frozenset(_trained_objects(source)) - {""}
    return text_of(node) in _TRAINED[source]


def _trained_objects(source: ParsedModule) -> Iterator[str]:
    for call in source.calls:
        if isinstance(call.func, cst.Attribute) and call.func.attr.value in ("compile", "fit"):
            keywords = {argument.keyword.value for argument in call.args if argument.keyword}
            compiles = call.func.attr.value == "compile" and keywords & {"loss", "optimizer", "metrics"}
            if compiles or (call.func.attr.value == "fit" and "epochs" in keywords):
                yield text_of(call.func.value)


def _ending(source: ParsedModule, path: cst.BaseExpression, depth: int = 5) -> cst.SimpleString | None:
    """Returns the literal with which a path ends, in ``"x"``, ``a + "x"``, ``os.path.join(a, "x")``,
    ``"x".format(a)``, or a
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
    source: ParsedModule, path: cst.BaseExpression, ending: cst.SimpleString, suffix: str
) -> tuple[cst.BaseExpression, str, str]:
    """Returns the node to change, its text and its template: the literal if it is part of the path, else the path
    plus a
    suffix.
    """
    is_part = ending is path or path in source.around(ending)
    if not is_part:
        return path, "", f'{{self}} + "{suffix}"'
    old = ending.raw_value.rstrip("/")
    stem = old.removesuffix(".h5").removesuffix(".hdf5") if suffix.endswith(".h5") else old
    return ending, f"{ending.prefix}{ending.quote}{stem}{suffix}{ending.quote}", ""

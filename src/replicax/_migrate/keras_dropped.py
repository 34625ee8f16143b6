"""Names and arguments of Keras 2 that Keras 3 does not have: renamed, removed if they have no effect, or marked.

Reads ``keras_arguments.json``, which ``tools/keras_arguments.py`` makes of the sources of both versions, and
``keras_dropped.toml``, which says what is to be done.
"""

from __future__ import annotations

import functools
import itertools
import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import libcst as cst
import libcst.matchers as m

from replicax._migrate import table
from replicax._migrate.keras_changes import is_below_keras, is_model, is_of_keras, is_optimizer
from replicax._migrate.name_bindings import ParsedModule, text_of

TABLE: Final = Path(__file__).with_name("keras_dropped.toml")
# What tools/keras_arguments.py found in the sources of Keras 2 and 3.
ARGUMENTS: Final = Path(__file__).with_name("keras_arguments.json")
# Keras 2 divides the rate by 1 + decay * step.
_DECAY: Final = "keras.optimizers.schedules.InverseTimeDecay({self}, 1, %s)"
# Callbacks that set the rate of an optimizer, which cannot be a schedule then.
_SET_RATE: Final = ("tf.keras.callbacks.ReduceLROnPlateau", "tf.keras.callbacks.LearningRateScheduler")
# Methods that objects of other libraries have, too.
_COMMON_METHODS: Final = frozenset({".save", ".fit", ".predict", ".evaluate", ".compute_mask"})


@final
@dataclass(frozen=True)
class Dropped:
    """A name or argument that Keras 3 does not have, or has elsewhere.

    Attributes:
      node: The name, or the call.
      what: The text of the mark; "" if there is none.
      write: The code to write instead.
      argument: The argument to remove; with a ``keyword``, the one to give by this keyword.
      keyword: The keyword in Keras 3.
      value: The expression to put into ``template``.
      template: The template around ``value``.
    """

    node: cst.CSTNode
    what: str = ""
    write: str = ""
    argument: cst.Arg | None = None
    keyword: str = ""
    value: cst.BaseExpression | None = None
    template: str = ""


@functools.cache
def dropped_by_keras() -> dict[str, Any]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


@functools.cache
def arguments_of_keras_2() -> dict[str, dict[str, list[str]]]:
    return json.loads(ARGUMENTS.read_text(encoding="utf-8"))


def _names() -> list[str]:
    return [*dropped_by_keras()["names"], *dropped_by_keras()["private"]]


def find_dropped(source: ParsedModule, *, uses_keras: bool) -> Iterator[Dropped]:
    """Yields the names, calls and arguments of a module that Keras 3 does not have."""
    for chain in source.chains:
        name = source.dotted(chain)
        path = name_in_keras_3(name) if name else None
        if path is None:
            continue
        gone = next((name for name in _names() if f"{path}.".startswith(f"{name}.")), None)
        if gone:
            yield Dropped(
                chain, f"Keras 3 has no keras.{gone}", "write what it does with other layers or functions"
            )
        call = source.parents[chain]
        if isinstance(call, cst.Call) and call.func is chain:
            yield from _of_call(source, call, path)
    for call in source.calls:
        if (base := _base_called(source, call)) is not None:
            yield from _of_call(source, call, base)
        elif uses_keras or (isinstance(call.func, cst.Attribute) and is_of_keras(source, call.func.value)):
            yield from _of_method(source, call)
        if uses_keras and isinstance(call.func, cst.Attribute):
            yield from _of_missing_method(source, call, call.func)


def _of_missing_method(source: ParsedModule, call: cst.Call, method: cst.Attribute) -> Iterator[Dropped]:
    """Yields a call of a method that Keras 3 does not have, if the object is certainly one of Keras."""
    name, owner = method.attr.value, method.value
    if source.full_name(method) or source.definition(method):
        return
    of_optimizers, of_layers = (dropped_by_keras()["methods"][group] for group in ("optimizers", "layers"))
    if name in of_optimizers and is_optimizer(source, owner):
        yield Dropped(call, f"optimizers of Keras 3 have no {name}", of_optimizers[name])
    around = source.class_around(call) if text_of(owner) == "self" else None
    is_of_layer = is_model(source, owner) or (around and is_below_keras(source, around))
    if name in of_layers and is_of_layer:
        yield Dropped(call, f"layers and models of Keras 3 have no {name}", of_layers[name])


def name_in_keras_3(name: str) -> str | None:
    """Returns the name in Keras 3, without ``keras.`` in front; None for a name of another library."""
    found = table.find(name)
    row = found.rows[0] if found else None
    target = row.bare(keras=True) if row and row.kind == "change" and not row.is_call else None
    if found is None or target is None or not f"{target}.".startswith("keras."):
        return None
    return f"{target}.{found.rest}".strip(".").removeprefix("keras").removeprefix(".")


def _base_called(source: ParsedModule, call: cst.Call) -> str | None:
    """Returns the name of the class of Keras whose ``__init__`` a call of ``super().__init__`` reaches."""
    function = call.func
    if not m.matches(function, m.Attribute(m.Call(m.Name("super")), m.Name("__init__"))):
        return None
    around = source.class_around(call)
    names = [source.dotted(base.value) for base in around.bases] if around else []
    return name_in_keras_3(names[0]) if len(names) == 1 and names[0] else None


def _of_call(source: ParsedModule, call: cst.Call, path: str) -> Iterator[Dropped]:
    group = path.partition(".")[0]
    rules = _Rules.of(path, group)
    yield from _of_decay(source, call, rules) if group == "optimizers" else ()
    yield from _of_keywords(source, call, rules)
    yield from _of_places(call, rules, path)


def _of_method(source: ParsedModule, call: cst.Call) -> Iterator[Dropped]:
    if (
        not isinstance(call.func, cst.Attribute)
        or source.full_name(call.func)
        or source.definition(call.func)
    ):
        return
    path = f".{call.func.attr.value}"
    rules = _Rules.of(path)
    if path in _COMMON_METHODS and not is_of_keras(source, call.func.value):
        if path == ".save":  # any object may have this method
            return
        rules = _Rules(rules.renamed, frozenset(), rules.unless, rules.marked | rules.removed, (), ())
    yield from _of_keywords(source, call, rules)
    yield from _of_places(call, rules, path)


@final
@dataclass(frozen=True)
class _Rules:
    """What happens to the arguments of one function.

    Attributes:
      renamed: Keyword of Keras 2 -> of Keras 3.
      removed: The keywords without effect.
      unless: Keyword -> the values with which it has no effect.
      marked: The other keywords that Keras 3 refuses.
      before, now: The arguments by place.
    """

    renamed: Mapping[str, str]
    removed: frozenset[str]
    unless: Mapping[str, list[str]]
    marked: frozenset[str]
    before: tuple[str, ...]
    now: tuple[str, ...]

    @staticmethod
    @functools.cache
    def of(path: str, group: str = "") -> _Rules:
        known, written = arguments_of_keras_2(), dropped_by_keras()
        found = known.get(path, {})
        gone = set(found.get("gone", ())) | set(written["arguments"].get(path, ()))
        if group == "layers":
            gone |= set(known["layers.Layer"]["gone"]) - set(written["accepted"].get(path, ()))
        renamed = written["renamed"].get(group, {}) | written["renamed"].get(path, {})
        removed = {*written["removed"].get(group, ()), *written["removed"].get(path, ())}
        unless = written["without_effect"].get(group, {}) | written["without_effect"].get(path, {})
        before, now = tuple(found.get("before", ())), tuple(found.get("now", ()))
        return _Rules(
            renamed, frozenset(removed), unless, frozenset(gone - removed - renamed.keys()), before, now
        )

    def keyword_at(self, place: int) -> str | None:
        """Returns the keyword for an argument by place: "" if none is needed; None if it is not known."""
        renamed = [self.renamed.get(name, name) for name in self.before]
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(renamed, self.now)))
        if place < same or not (self.before or self.now):
            return ""
        return renamed[place] if place < len(renamed) else None


def _of_keywords(source: ParsedModule, call: cst.Call, rules: _Rules) -> Iterator[Dropped]:
    for argument in call.args:
        keyword = argument.keyword.value if argument.keyword else ""
        if not keyword:
            continue
        if keyword in rules.removed or _text(source, argument.value) in rules.unless.get(keyword, ()):
            yield Dropped(call, argument=argument)
        elif keyword in rules.renamed:
            yield Dropped(call, argument=argument, keyword=rules.renamed[keyword])
        elif keyword in rules.marked:
            advice = dropped_by_keras()["write"].get(keyword, "leave it out, or write what it did")
            yield Dropped(call, f"Keras 3 has no argument {keyword} here", advice)


def _of_places(call: cst.Call, rules: _Rules, path: str) -> Iterator[Dropped]:
    """Gives arguments by keyword whose place has changed."""
    found = []
    for place, argument in enumerate(call.args):
        if argument.keyword or argument.star:
            break
        keyword = rules.keyword_at(place)
        if keyword is None or keyword in rules.marked:
            name = path.removeprefix(".") if path.startswith(".") else f"keras.{path}"
            what = f"{name} of Keras 3 has its arguments in another order"
            yield Dropped(call, what, "give them by keyword")
            return
        if keyword:
            found.append(
                Dropped(call, argument=argument, keyword="" if keyword in rules.removed else keyword)
            )
    yield from found


def _of_decay(source: ParsedModule, call: cst.Call, rules: _Rules) -> Iterator[Dropped]:
    """Makes a schedule of an optimizer's rate and ``decay``."""
    by_keyword = {argument.keyword.value: argument for argument in call.args if argument.keyword}
    decay = by_keyword.get("decay")
    if decay is None or _text(source, decay.value) in rules.unless.get("decay", ()):
        return
    first = call.args[0]
    rate = by_keyword.get("learning_rate") or by_keyword.get("lr") or (None if first.keyword else first)
    text = source.tree.code_for_node(decay.value)
    sets_rate = any(
        source.dotted(chain) in _SET_RATE for other in source.program.sources for chain in other.chains
    )
    if rate is None or rate.star or "{" in text or sets_rate:
        what = "keras.optimizers of Keras 3 have no argument decay"
        write = f"give learning_rate={_DECAY.format(self='rate') % 'decay'}"
        yield Dropped(call, what, f"{write}, and no callback that sets the rate" if sets_rate else write)
        return
    yield Dropped(call, argument=decay)
    yield Dropped(call, value=rate.value, template=_DECAY % text)


def _text(source: ParsedModule, node: cst.BaseExpression) -> str:
    return text_of(node) or source.tree.code_for_node(node)

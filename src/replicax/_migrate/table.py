"""The table of names: the replacement of each name of TensorFlow. Reads ``names.toml``, without modules or libcst.

The command, the messages at run time, the page on migrating and the tests all read this one table.

The replacement of a name is a template: see ``templates``.
"""

from __future__ import annotations

import ast
import functools
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, final

from replicax._migrate.call_arguments import (
    Arguments,
    BindError,
    Parameter,
    bound_to,
    holds_text,
    same_source,
)
from replicax._migrate.templates import PLACEHOLDER, as_names, dotted, given_name, simplified

TABLE: Final = Path(__file__).with_name("names.toml")
# Names of tf.compat.v1 and of TensorFlow 1 -> names of TensorFlow 2; tools/tensorflow_1_names.py makes the file.
TENSORFLOW_1: Final = Path(__file__).with_name("tensorflow_1.json")
# Modules that are other names of one of tf.keras.
_OF_KERAS: Final = re.compile(r"^tf\.(losses|metrics|optimizers|initializers)(?=\.|$)")

# A name that templates begin with -> the import that binds it.
ROOTS: Final = MappingProxyType(
    {
        "rx": "import replicax as rx",
        "keras": "import keras",
        "ops": "from keras import ops",
        "jnp": "import jax.numpy as jnp",
        "jax": "import jax",
        "np": "import numpy as np",
        "optax": "import optax",
        "contextlib": "import contextlib",
        "tf": "import tensorflow as tf",
        "logging": "import logging",
        "seed_generator": "seed_generator = keras.random.SeedGenerator(seed=0)",
    }
)
# The root that no import binds: the generator of a module's random numbers.
RANDOM: Final = "seed_generator"
# Keywords of TensorFlow 1 -> of TensorFlow 2.
_OLD_KEYWORDS: Final = MappingProxyType(
    {
        "keep_dims": "keepdims",
        "reduction_indices": "axis",
        "squeeze_dims": "axis",
        "dimension": "axis",
        "dim": "axis",
        "filter": "filters",
        "value": "input",
    }
)
# Arguments that every function of TensorFlow has and that have no effect here.
IGNORED: Final = frozenset({"name"})

Kind = Literal["change", "keep", "mark", "remove"]


@final
@dataclass(frozen=True)
class Row:
    """The replacement of one name.

    Attributes:
      name: The dotted name, such as ``tf.reduce_mean``; ``.numpy`` for a method or an attribute of any object.
      also: Other names of the same object, such as ``tf.math.reduce_mean``.
      parameters: The parameters of a function; None if the name itself is replaced, wherever it is.
      kind: "change"; "keep": it stays TensorFlow's; "mark": the command cannot decide; "remove": the statement is
        removed.
      with_keras, without_keras: The template in a file that uses Keras, and in one that does not; empty if there is
        none.
      in_step: The template inside a step, if it differs.
      note: A remark for the page.
      remark: A sentence that messages say after the name of the replacement.
      why, write: The text of the mark. A row that changes or keeps its name, and has a ``why``, is marked in steps.
      when: Source texts of arguments: the row is for calls with these. ``{other}`` is the text of another argument.
      ignore: Parameters that have no effect here. Other parameters that the template does not use are marked.
      examples: Expressions of TensorFlow that tests run.
      resolve_only: The reason why the row has no example that runs everywhere.
      section: The heading of the page.
    """

    name: str
    also: tuple[str, ...]
    parameters: tuple[Parameter, ...] | None
    kind: Kind
    with_keras: str
    without_keras: str
    in_step: str
    note: str
    remark: str
    why: str
    write: str
    when: Mapping[str, str]
    ignore: frozenset[str]
    examples: tuple[str, ...]
    resolve_only: str
    section: str

    @property
    def names(self) -> tuple[str, ...]:
        return (self.name, *self.also)

    @property
    def is_call(self) -> bool:
        return self.parameters is not None

    def parameter(self, keyword: str) -> str:
        """Returns the name of the parameter for a keyword, which may be TensorFlow 1's."""
        names = [parameter.name for parameter in self.parameters or ()]
        new = _OLD_KEYWORDS.get(keyword, "")
        return new if keyword not in names and new in names else keyword

    def action(self, *, keras: bool, step: bool = False) -> Kind:
        """Returns what happens to the name in a file, in a step or outside of steps."""
        if self.kind in ("mark", "remove"):
            return self.kind
        if step and self.in_step:
            return "change"
        if step and self.why:
            return "mark"
        return "mark" if self.kind == "change" and not self.template(keras=keras) else self.kind

    def template(self, *, keras: bool, step: bool = False) -> str:
        """Returns the template for a file, with ``xp`` resolved."""
        chosen = (step and self.in_step) or (self.with_keras if keras else self.without_keras)
        if keras:
            chosen = chosen.replace(":array", "").replace(
                ":operand", ""
            )  # keras.ops takes lists and variables
        return re.sub(r"\bxp\.", "ops." if keras else "jnp.", chosen)

    def bare(self, *, keras: bool) -> str | None:
        """Returns the name for a use without a call, such as ``map(tf.square, xs)``; None if there is no such name."""
        template = self.template(keras=keras)
        if self.parameters is None:
            return template or None
        tree = ast.parse(as_names(template)[0], mode="eval").body if template else None
        if not isinstance(tree, ast.Call) or dotted(tree.func) is None or not _is_plain(template):
            return None
        given = [argument.id if isinstance(argument, ast.Name) else "" for argument in tree.args]
        wanted = [given_name(parameter.name) for parameter in self.parameters if parameter.default is None]
        same = len(given) == len(wanted) and all(map(str.startswith, given, wanted))
        return dotted(tree.func) if same else None

    def bind(
        self,
        positional: Sequence[str],
        keywords: Mapping[str, str],
        *,
        keras: bool,
        step: bool = False,
    ) -> MatchedCall:
        """Returns the replacement of a call.

        Arguments equal to their default, and those without effect, are left out.

        Args:
          positional: The source texts of positional arguments.
          keywords: The source texts of keyword arguments.
          keras: True if the file uses Keras.
          step: True if the call is in a step.

        Raises:
          BindError: The row is not for this call.
        """
        parameters = self.parameters or ()
        keywords = {self.parameter(keyword): text for keyword, text in keywords.items()}
        bound = dict(bound_to(parameters, positional, keywords))
        for name, text in self.when.items():
            default = next((p.default for p in parameters if p.name == name), None)
            given = bound.get(name, default)
            text = str(bound.get(text[1:-1])) if text.startswith("{") else text
            if not (holds_text(str(given)) if text == ":text" else same_source(given, text)):
                raise BindError(f"{name} is not {text}")
        for parameter in parameters:
            if parameter.default is not None and same_source(bound.get(parameter.name), parameter.default):
                del bound[parameter.name]
        action = self.action(keras=keras, step=step)
        if action != "change":
            return MatchedCall(action, "", {})
        template = self.template(keras=keras, step=step)
        taken = {match[2] for match in PLACEHOLDER.finditer(template)}
        if left := sorted(bound.keys() - taken - self.ignore - self.when.keys() - IGNORED):
            raise BindError(f"the argument {', '.join(left)} has no counterpart")
        arguments = {name: text for name, text in bound.items() if name in taken}
        return MatchedCall("change", simplified(template, arguments), arguments)


def _is_plain(template: str) -> bool:
    """True if a call without optional arguments means the same: no argument has a value or a default of its own."""
    given = [match[4] for match in PLACEHOLDER.finditer(template)]
    return not any(given) and not re.search(r"\w+=(?!\{)", template)


@final
@dataclass(frozen=True)
class MatchedCall:
    """A call and a row: the action, the template, and the arguments by parameter, for ``fill``."""

    action: Kind
    template: str
    arguments: Arguments


@final
@dataclass(frozen=True)
class Section:
    """A heading of the page, its text, and its rows in order."""

    title: str
    text: str
    rows: tuple[Row, ...] = field(repr=False)


@final
@dataclass(frozen=True)
class Found:
    """The rows for a dotted name, in the order in which they are tried, and the rest of the name."""

    rows: tuple[Row, ...]
    rest: str


@functools.cache
def sections() -> tuple[Section, ...]:
    read = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    return tuple(
        Section(
            title=section["title"],
            text=section.get("text", ""),
            rows=tuple(_row(entry, section["title"]) for entry in section.get("name", ())),
        )
        for section in read["section"]
    )


@functools.cache
def rows() -> tuple[Row, ...]:
    return tuple(row for section in sections() for row in section.rows)


@functools.cache
def _by_name() -> Mapping[str, tuple[Row, ...]]:
    found: dict[str, tuple[Row, ...]] = {}
    for row in rows():
        for name in row.names:
            found[name] = (*found.get(name, ()), row)
    return found


@functools.cache
def _tensorflow_1() -> Mapping[str, str]:
    return json.loads(TENSORFLOW_1.read_text(encoding="utf-8"))


@functools.cache
def standard(name: str) -> str:
    """Returns the name of an object in the table: ``tf.keras.losses.MSE`` for ``tf.losses.MSE``.

    ``tf.compat.v2.x`` is ``tf.x``, and so is ``tf.compat.v1.x`` where both mean the same.
    """
    name = re.sub(r"^tf\.compat\.v2\.", "tf.", name)
    if name in _by_name():
        return name
    parts = re.sub(r"^tf\.(compat\.v1\.)?", "", name).split(".")
    for length in range(len(parts), 0, -1):
        found = _tensorflow_1().get(".".join(parts[:length]))
        if found is not None:
            return ".".join(["tf", found, *parts[length:]])
    return _OF_KERAS.sub(r"tf.keras.\1", name)


def find(name: str) -> Found | None:
    """Returns the rows of a name, or of the longest prefix that is not a function; None if there is none.

    Methods are found as ``.numpy``.
    """
    name = standard(name)
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        above = ".".join(parts[:length])
        matching = _by_name().get(above, ())
        if length < len(parts):
            matching = tuple(row for row in matching if not row.is_call)
        if matching:
            return Found(matching, ".".join(parts[length:]))
    return None


def target_of(name: str, *, keras: bool) -> str | None:
    """Returns the replacement that a message suggests for a name of TensorFlow, such as ``keras.ops.mean``; None if
    unknown.

    If it is not a single name, it is an expression with TensorFlow's names of the arguments.
    """
    found = find(name)
    if found is None:
        return None
    row = found.rows[0]
    if row.action(keras=keras, step=True) != "change":
        return None
    template = row.bare(keras=keras) if not row.in_step else None
    if template is None:
        template = row.template(keras=keras, step=True)
        called = ast.parse(as_names(template)[0], mode="eval").body
        function = dotted(called.func) if isinstance(called, ast.Call) else None
        template = function or PLACEHOLDER.sub(lambda match: match[1] + match[2], template)
    elif found.rest:
        template = f"{template}.{found.rest}"
    return re.sub(r"(?<![\w.])ops\.", "keras.ops.", template)


_FIELDS: Final = frozenset(
    {
        "tensorflow",
        "also",
        "kind",
        "becomes",
        "becomes_with_keras",
        "becomes_without_keras",
        "becomes_in_step",
        "note",
        "remark",
        "why",
        "write",
        "when",
        "ignore",
        "example",
        "examples",
        "resolve_only",
    }
)


def _row(entry: Mapping[str, Any], section: str) -> Row:
    name, bracket, _ = entry["tensorflow"].partition("(")
    if unknown := entry.keys() - _FIELDS:
        raise ValueError(f"{name}: unknown keys {sorted(unknown)}")
    both = entry.get("becomes", "")
    examples = entry.get("examples", [entry["example"]] if "example" in entry else [])
    return Row(
        name=name,
        also=tuple(entry.get("also", ())),
        parameters=tuple(_parameters(entry["tensorflow"])) if bracket else None,
        kind=entry.get("kind", "change"),
        with_keras=entry.get("becomes_with_keras", both),
        without_keras=entry.get("becomes_without_keras", both),
        in_step=entry.get("becomes_in_step", ""),
        note=entry.get("note", ""),
        remark=entry.get("remark", ""),
        why=entry.get("why", ""),
        write=entry.get("write", ""),
        when=MappingProxyType(dict(entry.get("when", {}))),
        ignore=frozenset(entry.get("ignore", ())),
        examples=tuple(examples),
        resolve_only=entry.get("resolve_only", ""),
        section=section,
    )


def _parameters(signature: str) -> Iterator[Parameter]:
    """Yields the parameters of ``tf.name(a, b=None, *rest, c=1)``."""
    arguments = ast.parse(f"def f({signature.partition('(')[2][:-1]}): ...").body[0].args  # type: ignore[attr-defined]
    places = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(places) - len(arguments.defaults)) + arguments.defaults
    for place, default in zip(places, defaults, strict=True):
        yield Parameter(place.arg, default and ast.unparse(default))
    if arguments.vararg:
        yield Parameter(arguments.vararg.arg, kind="variadic")
    for place, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        yield Parameter(place.arg, default and ast.unparse(default), "keyword_only")

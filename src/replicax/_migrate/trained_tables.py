"""Finds lookups of rows of a table that is trained. TensorFlow's gradient of the table is a list of the rows."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import libcst as cst

from replicax._migrate.flow import Place
from replicax._migrate.name_bindings import ParsedModule, Program, text_of
from replicax._migrate.reach import Reach

_LOOKUP: Final = re.compile(r"tf\.nn\.(safe_)?embedding_lookup(_sparse)?")
_GATHER: Final = re.compile(r"tf\.gather(_nd)?")
_MULTIPLIES: Final = re.compile(r"tf\.(linalg\.)?(matmul|einsum|tensordot)")
_VARIABLE: Final = re.compile(r"(tf\.(compat\.v1\.get_v|V)ariable|.*\badd_(weight|variable))")
_GRADIENT: Final = re.compile(r"(tf\.gradients|.*\.(compute_|get_)?gradients?)")


def looks_up(program: Program, reach: Reach) -> bool:
    """True for a program with an embedding, or with ``tf.gather`` of a variable."""
    return any(
        any(base == "tf.keras.layers.Embedding" for class_ in source.classes for base in source.bases(class_))
        or any(_is_lookup(source, reach, call) for call in source.calls)
        for source in program.sources
    )


def is_sparse_gradient(source: ParsedModule, reach: Reach, node: cst.BaseExpression) -> bool:
    """True for gradients of a tape, and for a parameter that is called so, unless they were made dense."""
    calls = []
    is_found = False
    for home, value in _unchanged(source, reach, node):
        if isinstance(value, cst.Call):
            calls.append(home.dotted(value.func))
            is_found |= bool(_GRADIENT.fullmatch(_name(home, value)))
        elif isinstance(value, cst.Name) and not home.values_of(value):
            is_found |= "grad" in value.value.lower()
    return is_found and "tf.convert_to_tensor" not in calls


def _is_lookup(source: ParsedModule, reach: Reach, call: cst.Call) -> bool:
    name = source.dotted(call.func) or ""
    if name == "tf.keras.layers.Embedding":
        return not _is_fixed(call)
    is_lookup, is_gather = _LOOKUP.fullmatch(name), _GATHER.fullmatch(name)
    if not (is_lookup or is_gather) or not call.args or reach.is_data(source, call):
        return False
    if any(_is_other_axis(argument) for argument in call.args) or _is_tied(source, reach, call.args[0].value):
        return False
    values = list(_unchanged(source, reach, call.args[0].value))
    made = [(home, value) for home, value in values if isinstance(value, cst.Call)]
    if is_lookup and not made:
        return True  # of a table whose origin is unknown
    return any(_VARIABLE.fullmatch(_name(home, value)) and not _is_fixed(value) for home, value in made)


def _is_tied(source: ParsedModule, reach: Reach, table: cst.BaseExpression) -> bool:
    """True for a table that a step also multiplies by, as for logits: the sum of both gradients is an array."""
    if not isinstance(table, cst.Attribute) or not text_of(table).startswith("self."):
        return False
    for chain in source.chains:
        around = source.parents[chain]
        if isinstance(around, cst.Arg) and text_of(chain) == text_of(table) and reach.is_step(source, chain):
            name = source.dotted(source.parents[around].func) or ""  # type: ignore[attr-defined]
            if _MULTIPLIES.fullmatch(name):
                return True
    return False


def _unchanged(source: ParsedModule, reach: Reach, node: cst.BaseExpression) -> Iterator[Place]:
    """Yields the expressions that a value, or a list of values, comes from without arithmetic."""
    seen: set[cst.CSTNode] = set()
    waiting: list[Place] = [(source, node)]
    while waiting:
        home, value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        yield home, value
        if isinstance(value, cst.Name | cst.Attribute):
            waiting += reach.values_of(home, value)
        elif isinstance(value, cst.Call):
            waiting += reach.results_of(home, value)
            name = home.dotted(value.func)
            if name is None and home.definition(value.func) is None:  # `zip(grads, vs)`, `table.read_value()`
                waiting += ((home, argument.value) for argument in value.args)
                if isinstance(value.func, cst.Attribute):
                    waiting.append((home, value.func.value))
            elif name in ("tf.identity", "tf.convert_to_tensor") and value.args:
                waiting.append((home, value.args[0].value))
        elif isinstance(value, cst.List | cst.Tuple):
            waiting += ((home, element.value) for element in value.elements)
        elif isinstance(value, cst.ListComp | cst.GeneratorExp):
            waiting.append((home, value.elt))
        elif isinstance(value, cst.IfExp):
            waiting += ((home, value.body), (home, value.orelse))
        elif isinstance(value, cst.Subscript):
            waiting.append((home, value.value))


def _name(source: ParsedModule, call: cst.Call) -> str:
    """Returns ``tf.Variable``, or ``.add_weight`` for a method of an object."""
    method = f".{call.func.attr.value}" if isinstance(call.func, cst.Attribute) else ""
    return source.dotted(call.func) or method


def _is_fixed(call: cst.Call) -> bool:
    """True for ``trainable=False``."""
    return any(
        a.keyword
        and a.keyword.value == "trainable"
        and isinstance(a.value, cst.Name)
        and a.value.value == "False"
        for a in call.args
    )


def _is_other_axis(argument: cst.Arg) -> bool:
    """True for ``axis=1`` and ``batch_dims=1``, with which TensorFlow's gradient is an array."""
    is_place = argument.keyword is not None and argument.keyword.value in ("axis", "batch_dims")
    return is_place and not (isinstance(argument.value, cst.Integer) and argument.value.value == "0")

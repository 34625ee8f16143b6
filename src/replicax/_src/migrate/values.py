"""Facts about values that the source shows: shapes, which are Python's, and integers."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import libcst as cst

from replicax._src.migrate.bindings import Source

_SHAPE: Final = ("tf.shape", "tf.compat.v1.shape")
# Names of rows -> their replacements for shapes, which stay known while a function is traced.
OF_SHAPES: Final = MappingProxyType(
    {
        "tf.concat": "np.concatenate({values}, axis={axis})",
        "tf.stack": "np.stack({values}, axis={axis})",
        "tf.unstack": "list({value})",
        "tf.reduce_prod": "np.prod({input_tensor}, axis={axis})",
    }
)
_LOCAL: Final = ("experimental_local_results", "unwrap")
_INTEGERS: Final = (
    "tf.argmax",
    "tf.argmin",
    "tf.size",
    "tf.shape",
    "tf.rank",
    "tf.math.argmax",
    "tf.math.argmin",
)
_INTEGER_TYPES: Final = ("tf.int8", "tf.int16", "tf.int32", "tf.int64", "tf.uint8")


def is_shape(source: Source, node: cst.BaseExpression, depth: int = 5) -> bool:
    """True for a shape, a part of one, or a list with a size from one."""
    if depth == 0:
        return False
    if isinstance(node, cst.Call):
        return source.dotted(node.func) in _SHAPE
    if isinstance(node, cst.Subscript):
        return is_shape(source, node.value, depth - 1)
    if isinstance(node, cst.List | cst.Tuple):
        return any(is_shape(source, element.value, depth - 1) for element in node.elements)
    if isinstance(node, cst.BinaryOperation):
        return is_shape(source, node.left, depth - 1) or is_shape(source, node.right, depth - 1)
    return any(is_shape(source, value, depth - 1) for value in source.values(node))


def is_calculated_with(source: Source, node: cst.CSTNode) -> bool:
    """True for a full shape in arithmetic or a comparison, also by a name."""
    parent = source.parents[node]
    if isinstance(
        parent,
        cst.BinaryOperation | cst.UnaryOperation | cst.Comparison | cst.ComparisonTarget | cst.AugAssign,
    ):
        return True
    if isinstance(parent, cst.Subscript) and parent.value is node:
        slices = [element.slice for element in parent.slice]
        return all(isinstance(part, cst.Slice) for part in slices) and is_calculated_with(source, parent)
    if isinstance(parent, cst.Assign) and parent.value is node:
        return any(is_calculated_with(source, use) for use in uses_of(source, parent))
    return False


def uses_of(source: Source, statement: cst.Assign) -> Iterator[cst.Name]:
    """Yields the reads of a name that a statement assigns, in its scope and those below it."""
    names = [target.target for target in statement.targets if isinstance(target.target, cst.Name)]
    for name in names:
        for assignment in source.scope_of(name)[name.value]:
            for access in assignment.references:
                if isinstance(access.node, cst.Name) and access.node is not name:
                    yield access.node


def is_parts(source: Source, node: cst.BaseExpression, depth: int = 3) -> bool:
    """True for the values of a per-replica result: ``strategy.experimental_local_results(x)``, or ``x.values``."""
    if isinstance(node, cst.Call):
        return isinstance(node.func, cst.Attribute) and node.func.attr.value in _LOCAL
    if isinstance(node, cst.Attribute) and node.attr.value == "values":
        made = source.values(node.value)
        return any(
            isinstance(v, cst.Call)
            and isinstance(v.func, cst.Attribute)
            and v.func.attr.value in ("run", "experimental_run_v2")
            for v in made
        )
    return depth > 0 and any(is_parts(source, value, depth - 1) for value in source.values(node))


def is_variable(source: Source, node: cst.BaseExpression) -> bool:
    """True for a name or an attribute to which a variable is assigned."""
    for value in source.values(node):
        if isinstance(value, cst.Call):
            is_weight = isinstance(value.func, cst.Attribute) and value.func.attr.value == "add_weight"
            if is_weight or source.dotted(value.func) == "tf.Variable":
                return True
    return False


def is_integer(source: Source, node: cst.BaseExpression, depth: int = 5) -> bool:
    """True for an array of integers, if the source shows that."""
    if depth == 0:
        return False
    if isinstance(node, cst.List | cst.Tuple) and node.elements:
        return all(is_integer(source, element.value, depth - 1) for element in node.elements)
    if isinstance(node, cst.Integer):
        return True
    if not isinstance(node, cst.Call):
        values = list(source.values(node))
        return bool(values) and all(is_integer(source, value, depth - 1) for value in values)
    name = source.dotted(node.func) or ""
    types = [source.dotted(argument.value) for argument in node.args]
    if any(each in _INTEGER_TYPES for each in types):
        return True
    if name in ("tf.constant", "tf.range", "tf.convert_to_tensor"):
        is_typed = any(argument.keyword and argument.keyword.value == "dtype" for argument in node.args)
        given = [argument.value for argument in node.args if argument.keyword is None]
        return not is_typed and bool(given) and all(is_integer(source, value, depth - 1) for value in given)
    return name in _INTEGERS

"""Facts about values that the source shows: shapes, which are Python's, integers, and kinds of devices."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Final

import libcst as cst
from libcst.metadata import Assignment

from replicax._migrate.name_bindings import ParsedModule

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


def is_shape(source: ParsedModule, node: cst.BaseExpression, depth: int = 5) -> bool:
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


def is_size(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for a size of an array, which is a Python number in JAX: ``tf.size(x)``, ``tf.shape(x)[0]``."""
    return any(
        source.dotted(value.func) == "tf.size"
        if isinstance(value, cst.Call)
        else isinstance(value, cst.Subscript) and is_shape(source, value)
        for value in (node, *source.values(node))
    )


def is_calculated_with(source: ParsedModule, node: cst.CSTNode) -> bool:
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


def uses_of(source: ParsedModule, statement: cst.Assign) -> Iterator[cst.Name]:
    """Yields the reads of a name that a statement assigns, in its scope and those below it."""
    names = [target.target for target in statement.targets if isinstance(target.target, cst.Name)]
    for name in names:
        for assignment in source.scope_of(name)[name.value]:
            for access in assignment.references:
                if isinstance(access.node, cst.Name) and access.node is not name:
                    yield access.node


def is_parts(source: ParsedModule, node: cst.BaseExpression, depth: int = 3) -> bool:
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


def is_variable(source: ParsedModule, node: cst.BaseExpression) -> bool:
    """True for a name or an attribute to which a variable is assigned."""
    for value in source.values(node):
        if isinstance(value, cst.Call):
            is_weight = isinstance(value.func, cst.Attribute) and value.func.attr.value == "add_weight"
            if is_weight or source.dotted(value.func) == "tf.Variable":
                return True
    return False


def is_integer(source: ParsedModule, node: cst.BaseExpression, depth: int = 5) -> bool:
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


VIRTUAL_DEVICES: Final = "tf.config.set_logical_device_configuration"
_LISTS_OF_DEVICES: Final = (
    "tensorflow.config.list_physical_devices",
    "tensorflow.config.experimental.list_physical_devices",
    "tensorflow.config.get_visible_devices",
    "tensorflow.config.experimental.get_visible_devices",
    "replicax.config.list_physical_devices",
)


def is_gpu(source: ParsedModule, node: cst.BaseExpression, depth: int = 6) -> bool:
    """True for a device that comes from ``tf.config.list_physical_devices("GPU")``."""
    if depth == 0:
        return False
    if isinstance(node, cst.Call):
        texts = [a.value.evaluated_value for a in node.args if isinstance(a.value, cst.SimpleString)]
        return source.full_name(node.func) in _LISTS_OF_DEVICES and "GPU" in texts
    if isinstance(node, cst.Subscript):
        return is_gpu(source, node.value, depth - 1)
    values = [*source.values(node), *_looped_over(source, node)]
    return any(is_gpu(source, value, depth - 1) for value in values)


def is_limit_of_gpu(source: ParsedModule, call: cst.Call) -> bool:
    """True for the one configuration of a GPU that limits its memory."""
    return is_gpu(source, call.args[0].value) and _makes_one(call)


def is_division_of_gpu(source: ParsedModule, call: cst.Call) -> bool:
    """True for several devices that are parts of a GPU."""
    return bool(call.args) and is_gpu(source, call.args[0].value) and not _makes_one(call)


def _makes_one(call: cst.Call) -> bool:
    made = call.args[-1].value
    return isinstance(made, cst.List) and len(made.elements) == 1


def _looped_over(source: ParsedModule, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
    """Yields the ``gpus`` of ``for gpu in gpus`` for the name ``gpu``."""
    if not isinstance(node, cst.Name) or not source.is_bound(node):
        return
    for assignment in source.scope_of(node)[node.value]:
        target = assignment.node if isinstance(assignment, Assignment) else None
        loop = source.parents.get(target) if target else None
        if isinstance(loop, cst.For | cst.CompFor) and loop.target is target:
            yield loop.iter

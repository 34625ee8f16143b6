"""Follows values backwards: from a name, parameter, attribute or call to the expressions that it may come from."""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Final, TypeAlias, final

import libcst as cst
from libcst.metadata import Assignment

from replicax._migrate.imports import is_below
from replicax._migrate.name_bindings import Function, ParsedModule, Program, parts_of, text_of

Place: TypeAlias = tuple[ParsedModule, cst.BaseExpression]
# The calls of a function: the module of each, and the arguments.
Callers: TypeAlias = Mapping[cst.CSTNode, Sequence[tuple[ParsedModule, Sequence[cst.Arg]]]]

# What is asked of a tensor or a variable on the host, and is none.
GIVES_NUMBERS: Final = frozenset(
    {"numpy", "shape", "dtype", "ndim", "as_list", "item", "tolist", "name", "device"}
)
# They save objects, among them models and optimizers, which change.
SAVES: Final = ("tf.train.Checkpoint", "tf.train.CheckpointManager")


@final
class Flow:
    """The values of a program."""

    def __init__(self, program: Program, callers: Callers) -> None:
        self._program, self._callers = program, callers
        self._of_names: dict[Hashable, list[Place]] = {}

    def closure(
        self, places: Iterable[Place], outside: Container[Function | None]
    ) -> dict[cst.CSTNode, ParsedModule]:
        """Returns the expressions, and all from which their values come, except those in some functions.

        It does not go on to the variable of ``int(v.numpy())``, which is a number whatever library the variable is of,
        nor to checkpoints, which save models and optimizers, too.
        """
        reached: dict[cst.CSTNode, ParsedModule] = {}
        seen: set[tuple[cst.CSTNode, bool]] = set()
        waiting = [(source, node, False) for source, node in places]
        while waiting:
            source, node, is_number = waiting.pop()
            if (node, is_number) in seen or _is_state(source, node, is_number=is_number):
                continue
            seen.add((node, is_number))
            if source.function_around(node) in outside:
                continue
            reached[node] = source
            for part in self.parts(source, node):
                is_read = is_number or _is_read_as_number(source, part, node)
                waiting += ((home, value, is_read) for home, value in self.origins(source, part))
        return reached

    def parts(self, source: ParsedModule, node: cst.CSTNode) -> Iterator[cst.BaseExpression]:
        """Yields the names, attributes and calls in an expression whose values it may contain."""
        if isinstance(node, cst.Lambda):
            return
        if isinstance(node, cst.Name | cst.Attribute) and parts_of(node):
            if source.is_bound(parts_of(node)[0]):
                yield node
            return
        if isinstance(node, cst.Call):
            yield node
            if source.definition(node.func) is not None:  # its parameters lead to the arguments
                return
            if isinstance(node.func, cst.Attribute):
                yield from self.parts(source, node.func.value)
        for child in node.children:
            if not (isinstance(node, cst.Call) and child is node.func) and not isinstance(child, cst.AsName):
                is_named = isinstance(node, cst.Arg) and child is node.keyword
                yield from self.parts(source, child) if not is_named else ()

    def origins(self, source: ParsedModule, node: cst.BaseExpression) -> Iterator[Place]:
        """Yields the expressions that a name or an attribute is assigned, or that a call of the program returns."""
        if isinstance(node, cst.Call):
            yield from self._results(source, node)
        elif isinstance(node, cst.Attribute):
            yield from self._of_attribute(source, node)
            first = parts_of(node)[0]
            if source.full_name(node) is None and first.value not in ("self", "cls"):
                yield from self._of_name(source, first)
        elif isinstance(node, cst.Name):
            yield from self._of_name(source, node)

    def given_for(
        self, function: cst.CSTNode, parameter: cst.Param, place: int, *, is_method: bool
    ) -> Iterator[Place]:
        """Yields the arguments that calls give a parameter."""
        for caller, arguments in self._callers.get(function, ()):
            number = int(is_method)
            for argument in arguments:
                keyword = argument.keyword.value if argument.keyword else None
                if keyword == parameter.name.value or (
                    keyword is None and not argument.star and number == place
                ):
                    yield caller, argument.value
                number += keyword is None

    def _of_name(self, source: ParsedModule, name: cst.Name) -> list[Place]:
        variable = source.variable(name)
        if variable not in self._of_names:
            self._of_names[variable] = list(self._find_of_name(source, name))
        return self._of_names[variable]

    def _find_of_name(self, source: ParsedModule, name: cst.Name) -> Iterator[Place]:
        bound = source.binding(name)
        if bound is not None:
            module = self._program.module(bound.dotted.rpartition(".")[0])
            if module is not None and module is not source:
                yield from _assigned_in(module, bound.dotted.rpartition(".")[2])
            return
        for assignment in source.scope_of(name)[name.value]:
            target = assignment.node if isinstance(assignment, Assignment) else None
            if isinstance(target, cst.Param):
                yield from self._of_parameter(source, target)
            elif target is not None:
                yield from self._given_to(source, target)

    def _given_to(self, source: ParsedModule, target: cst.CSTNode) -> Iterator[Place]:
        """Yields what a statement gives to a name that it binds; for one of several names, its part if written."""
        around = source.parents.get(target)
        if isinstance(around, cst.Element):
            yield from self._part(source, around)
        elif isinstance(around, cst.AssignTarget):
            statement = source.parents[around]
            assert isinstance(statement, cst.Assign)
            yield source, statement.value
        elif isinstance(around, cst.AnnAssign | cst.AugAssign | cst.NamedExpr):
            if around.value is not None:
                yield source, around.value
        elif isinstance(around, cst.For | cst.CompFor):
            yield from ((source, element) for element in _elements(around.iter) or [around.iter])
        elif isinstance(around, cst.AsName):
            item = source.parents[around]
            if isinstance(item, cst.WithItem):
                yield source, item.item

    def _part(self, source: ParsedModule, element: cst.Element) -> Iterator[Place]:
        """Yields the ``1`` of ``a, b = 1, 2`` for ``a``; the whole value if its parts are not written."""
        several = source.parents[element]
        assert isinstance(several, cst.Tuple | cst.List)
        place = several.elements.index(element)
        for home, value in self._given_to(source, several):
            results = list(self._results(home, value)) if isinstance(value, cst.Call) else []
            for where, each in results or [(home, value)]:
                written = _elements(each)
                is_same_number = len(written) == len(several.elements)
                yield (where, written[place]) if is_same_number else (home, value)

    def _of_parameter(self, source: ParsedModule, parameter: cst.Param) -> Iterator[Place]:
        function = next(n for n in source.around(parameter) if isinstance(n, cst.FunctionDef | cst.Lambda))
        if parameter.default is not None:
            yield source, parameter.default
        places = [*function.params.posonly_params, *function.params.params]
        place = places.index(parameter) if parameter in places else -1
        is_method = isinstance(function, cst.FunctionDef) and source.class_around(function) is not None
        yield from self.given_for(function, parameter, place, is_method=is_method)

    def _of_attribute(self, source: ParsedModule, node: cst.Attribute) -> Iterator[Place]:
        """Yields what is assigned to ``self.name``, or to ``pipeline.name`` if the class of ``pipeline`` is known."""
        for part in (node, *_inner(node)):
            if text_of(part.value) in ("self", "cls"):
                class_, home = source.class_around(part), source
            else:
                found = source.definition(part.value)
                class_ = found.node if found and isinstance(found.node, cst.ClassDef) else None
                home = found.source if found else source
            if class_ is not None:
                yield from ((home, value) for value in home.attributes_of(class_, part.attr.value))

    def _results(self, source: ParsedModule, call: cst.Call) -> Iterator[Place]:
        made = source.definition(call.func)
        if made is None or isinstance(made.node, cst.ClassDef):
            return
        if isinstance(made.node, cst.Lambda):
            yield made.source, made.node.body
            return
        for statement in made.source.statements:
            if isinstance(statement, cst.Return) and made.source.owners[statement] is made.node:
                yield from ((made.source, value) for value in [statement.value] if value is not None)


def _elements(node: cst.BaseExpression) -> list[cst.BaseExpression]:
    """Returns the elements of a list or a tuple; none for anything else."""
    return [element.value for element in node.elements] if isinstance(node, cst.List | cst.Tuple) else []


def _is_state(source: ParsedModule, node: cst.CSTNode, *, is_number: bool) -> bool:
    """True for a checkpoint, and for a variable of which a number is read."""
    name = source.dotted(node.func) if isinstance(node, cst.Call) else None
    return is_below(name, *SAVES) or (is_number and name == "tf.Variable")


def _is_read_as_number(source: ParsedModule, node: cst.CSTNode, whole: cst.CSTNode) -> bool:
    """True for the ``v`` of ``v.numpy()``, ``v.shape`` and ``int(v + 1)`` in an expression."""
    while True:
        if isinstance(node, cst.Attribute) and node.attr.value in GIVES_NUMBERS:
            return True
        if isinstance(node, cst.Call) and text_of(node.func) in ("int", "float", "bool", "len"):
            return True
        if node is whole:
            return False
        node = source.parents[node]


def _inner(node: cst.Attribute) -> Iterator[cst.Attribute]:
    """Yields the ``self.a`` of ``self.a.b``."""
    while isinstance(node.value, cst.Attribute):
        node = node.value
        yield node


def _assigned_in(module: ParsedModule, name: str) -> Iterator[Place]:
    """Yields what a module assigns to one of its names."""
    for statement in module.tree.body:
        for small in statement.body if isinstance(statement, cst.SimpleStatementLine) else ():
            if isinstance(small, cst.Assign) and any(text_of(t.target) == name for t in small.targets):
                yield module, small.value

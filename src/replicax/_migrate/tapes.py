"""Tapes outside of steps: finds the statements around them that become a function, which replicax can trace."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, TypeAlias, final

import libcst as cst
import libcst.matchers as m
from libcst.metadata import Assignment, BuiltinAssignment, ClassScope, ImportAssignment

from replicax._migrate.name_bindings import ParsedModule, parts_of, text_of

_TAPE: Final = "tf.GradientTape"
_NAME: Final = "traced_step"
# Python code whose effect happens once, at tracing, or that needs a value that is unknown then.
_NOT_TRACED: Final = re.compile(
    r"(numpy\.random|random|time|os|sys|logging|tensorflow\.(summary|train|io|print|saved_model))\..*"
    r"|(print|float|int|bool|open|input|super|locals|globals|eval|exec|next)"
)
_METHODS_NOT_TRACED: Final = frozenset(
    {
        "append",
        "extend",
        "add",
        "update",
        "numpy",
        "item",
        "tolist",
        "write",
        "save",
        "restore",
        "result",
        "pop",
    }
)
_LEAVES: Final = (
    cst.Return | cst.Await | cst.Yield | cst.Break | cst.Continue | cst.While | cst.FunctionDef | cst.ClassDef | cst.Try
    | cst.Global | cst.Nonlocal | cst.Import | cst.ImportFrom | cst.NamedExpr | cst.Raise | cst.Match | cst.If | cst.Lambda
)  # fmt: skip

Statement: TypeAlias = cst.SimpleStatementLine | cst.BaseCompoundStatement


@final
@dataclass(frozen=True, eq=False)
class Taped:
    """Statements that become a function.

    Attributes:
      statements: Adjacent statements; the first is the ``with`` of a tape.
      name: The name of the function.
      parameters: The outer names that the statements read.
      results: The names that they assign and that others read.
      returns: True if the last statement is a ``return``.
      above: The statement of the module above which the function goes.
      nodes: All nodes of the statements.
    """

    statements: tuple[cst.CSTNode, ...]
    name: str
    parameters: tuple[str, ...]
    results: tuple[str, ...]
    returns: bool
    above: cst.CSTNode
    nodes: frozenset[cst.CSTNode] = field(repr=False)


def is_tape(source: ParsedModule, statement: cst.CSTNode) -> bool:
    """True for ``with tf.GradientTape() as tape:``, also with several tapes."""
    if not isinstance(statement, cst.With):
        return False
    calls = [item.item.func for item in statement.items if isinstance(item.item, cst.Call)]
    return any(source.dotted(function) == _TAPE for function in calls)


def find_taped(source: ParsedModule, tapes: Sequence[cst.With]) -> Iterator[Taped]:
    """Yields the functions for those of the tapes that are outside of steps and can move into one."""
    taken = source.names_assigned() | {bound.name for bound in source.bounds}
    inside: set[cst.CSTNode] = set()
    blocks = [_Block(source, tape) for tape in tapes]
    for block in blocks:
        if block.tape in inside or any(block.tape in other.nodes for other in blocks if other is not block):
            continue  # it moves or stays with the tape around it
        number, name = 1, _NAME
        while name in taken:
            number += 1
            name = f"{_NAME}_{number}"
        found = block.taped(name, [other for other in blocks if other is not block])
        if found is not None:
            taken.add(name)
            inside |= found.nodes
            yield found


class _Cannot(Exception):
    """The statements cannot become a function."""


@final
class _Block:
    """The statements of one tape: its ``with``, and the following ones that take gradients from it or apply them."""

    def __init__(self, source: ParsedModule, tape: cst.With) -> None:
        self._source, self.tape = source, tape
        self.tapes = {text_of(item.asname.name) for item in tape.items if item.asname}
        self.statements = self._statements()
        self.nodes = frozenset(node for statement in self.statements for node in nodes_below(statement))

    def taped(self, name: str, others: Sequence[_Block]) -> Taped | None:
        """Returns the function that replaces the statements; None if that is impossible."""
        try:
            if isinstance(self._source.scope_of(self._first), ClassScope):
                raise _Cannot  # its names are attributes of the class
            self._check()
            parameters, results = self._names()
            self._check_tapes(others)
        except _Cannot:
            return None
        above = next(n for n in (self.tape, *self._source.around(self.tape)) if n in self._source.tree.body)
        if above is self.statements[0]:
            above = self.statements[-1]
        return Taped(self.statements, name, parameters, results, self.returns, above, self.nodes)

    def _statements(self) -> tuple[cst.CSTNode, ...]:
        source, around = self._source, self._source.parents[self.tape]
        is_of_module = self.tape in source.tree.body
        body: Sequence[cst.CSTNode] = source.tree.body if is_of_module else around.body  # type: ignore[attr-defined]
        start = end = body.index(self.tape)
        for place in range(start + 1, len(body)):
            if is_tape(source, body[place]):
                break
            if isinstance(body[place], cst.FunctionDef | cst.ClassDef):
                continue
            if self.tapes & {name.value for name in _names(body[place])}:
                end = place
        while end + 1 < len(body) and _applies_gradients(body[end + 1]):
            end += 1
        return tuple(body[start : end + 1])

    def _check_tapes(self, others: Sequence[_Block]) -> None:
        """Raises if the tapes are read elsewhere, unless another tape has the name there."""
        own = self._source.scope_of(self._first)
        for name in self.tapes:
            shared = self.nodes.union(*(other.nodes for other in others if name in other.tapes))
            if self._is_read_elsewhere(name, own, shared):
                raise _Cannot

    @property
    def returns(self) -> bool:
        """True if the last statement is a ``return``, which no statement follows."""
        return _return_of(self.statements[-1]) is not None

    @property
    def _first(self) -> cst.CSTNode:
        return self.tape.items[0].item

    def _check(self) -> None:
        source = self._source
        if not all(
            isinstance(item.item, cst.Call)
            and source.dotted(item.item.func) == _TAPE
            and item.asname is not None
            and isinstance(item.asname.name, cst.Name)
            for item in self.tape.items
        ):
            raise _Cannot
        for node in self.nodes:
            if isinstance(node, _LEAVES) and not (self.returns and node is _return_of(self.statements[-1])):
                raise _Cannot
            if isinstance(node, cst.Name) and node.value.startswith("__replicax_"):
                raise _Cannot  # a line for IPython
            if isinstance(node, cst.Name) and node.value in self.tapes and not self._is_used_as_tape(node):
                raise _Cannot
            if isinstance(node, cst.AssignTarget | cst.AnnAssign | cst.AugAssign | cst.For) and not all(
                isinstance(part, cst.Name) for part in _targets(node.target)
            ):
                raise _Cannot
            if isinstance(node, cst.Call):
                name = source.full_name(node.func) or text_of(node.func)
                method = node.func.attr.value if isinstance(node.func, cst.Attribute) else ""
                if _NOT_TRACED.fullmatch(name) or method in _METHODS_NOT_TRACED:
                    raise _Cannot

    def _is_used_as_tape(self, name: cst.Name) -> bool:
        """True for ``tape.gradient``, ``as tape`` and ``del tape``; False if the tape itself is passed on."""
        around = (self._source.parents[name], *self._source.around(self._source.parents[name]))
        if isinstance(around[0], cst.Attribute | cst.AsName | cst.Del):
            return True
        return isinstance(around[0], cst.Element) and isinstance(around[2], cst.Del)

    def _names(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Returns the parameters of the function, and its results."""
        source = self._source
        own = source.scope_of(self._first)
        first_write: dict[str, int] = {}
        for place, node in enumerate(_in_order(self.statements)):
            for target in _written(node):
                first_write.setdefault(target, place)
        read: dict[str, bool] = {}  # name -> it is read before it is written
        for place, node in enumerate(_in_order(self.statements)):
            if isinstance(node, cst.Del):
                continue
            for name in _read(node):
                if (source.is_bound(name) and source.scope_of(name) is own) or name.value not in first_write:
                    is_before = name.value not in first_write or first_write[name.value] >= place
                    read[name.value] = read.get(name.value, False) or is_before
        given = [name for name, is_before in read.items() if is_before and self._is_variable(name)]
        assigned = [name for name in first_write if name not in self.tapes and not self.returns]
        return tuple(given), tuple(n for n in assigned if self._is_read_elsewhere(n, own, self.nodes))

    def _is_variable(self, name: str) -> bool:
        """True for a name that becomes a parameter of the function; False for one that it finds in the module."""
        assignments = [a for a in self._source.scope_of(self._first)[name] if isinstance(a, Assignment)]
        if not assignments:
            return False  # a builtin, or unknown
        is_of_module = assignments[0].scope is self._source.scope_of(self._source.tree.body[0])
        for assignment in assignments:
            if isinstance(assignment, ImportAssignment | BuiltinAssignment):
                return False
            if isinstance(assignment.node, cst.FunctionDef | cst.ClassDef):
                if not is_of_module:
                    raise _Cannot  # it is another function each time
                return False
        if all(assignment.node in self.nodes for assignment in assignments):
            raise _Cannot  # read before it is written
        if is_of_module and len(assignments) == 1:
            target = self._source.parents.get(assignments[0].node)
            statement = self._source.parents.get(target) if target is not None else None
            if isinstance(statement, cst.Assign) and _is_literal(statement.value):
                return False
        return True

    def _is_read_elsewhere(self, name: str, own: object, nodes: Set[cst.CSTNode]) -> bool:
        return any(
            chain not in nodes
            for chain in self._source.chains
            if parts_of(chain)[0].value == name
            and any(a.scope is own for a in self._source.scope_of(parts_of(chain)[0])[name])
        )


def nodes_below(node: cst.CSTNode) -> Iterator[cst.CSTNode]:
    """Yields a node and all nodes in it."""
    yield node
    for child in node.children:
        yield from nodes_below(child)


def _in_order(statements: Sequence[cst.CSTNode]) -> Iterator[cst.CSTNode]:
    """Yields the simple statements and the heads of compound ones, in the order in which they run."""
    for statement in statements:
        for node in nodes_below(statement):
            if isinstance(node, cst.BaseSmallStatement | cst.With | cst.For):
                yield node


def _written(node: cst.CSTNode) -> list[str]:
    if isinstance(node, cst.Assign):
        found = [part for target in node.targets for part in _targets(target.target)]
    elif isinstance(node, cst.AnnAssign | cst.AugAssign | cst.For):
        found = _targets(node.target)
    elif isinstance(node, cst.With):
        found = [part for item in node.items if item.asname for part in _targets(item.asname.name)]
    else:
        found = []
    return [part.value for part in found if isinstance(part, cst.Name)]


def _read(node: cst.CSTNode) -> Iterator[cst.Name]:
    """Yields the names that a statement reads; for a compound one, those of its head."""
    if isinstance(node, cst.With):
        parts: list[cst.CSTNode] = [item.item for item in node.items]
    elif isinstance(node, cst.For):
        parts = [node.iter]
    elif isinstance(node, cst.Assign):
        parts = [node.value]
    elif isinstance(node, cst.AnnAssign):
        parts = [node.value] if node.value else []
    else:
        parts = [node]
    for part in parts:
        yield from _names(part)


def _names(node: cst.CSTNode) -> Iterator[cst.Name]:
    """Yields the names that are not attributes or keywords."""
    if isinstance(node, cst.Name):
        yield node
    elif isinstance(node, cst.Attribute | cst.Arg):
        yield from _names(node.value)
    else:
        for child in node.children:
            yield from _names(child)


def _targets(target: cst.BaseExpression) -> list[cst.BaseExpression]:
    if isinstance(target, cst.Tuple | cst.List):
        return [part for element in target.elements for part in _targets(element.value)]
    return [target]


def _return_of(statement: cst.CSTNode) -> cst.Return | None:
    if not isinstance(statement, cst.SimpleStatementLine):
        return None
    last = statement.body[-1]
    return last if isinstance(last, cst.Return) and last.value is not None else None


def _applies_gradients(statement: cst.CSTNode) -> bool:
    return m.matches(
        statement,
        m.SimpleStatementLine(
            [m.Expr(m.Call(func=m.Attribute(attr=m.Name("apply_gradients") | m.Name("apply"))))]
        ),
    )


def _is_literal(node: cst.BaseExpression) -> bool:
    if isinstance(node, cst.Tuple | cst.List):
        return all(_is_literal(element.value) for element in node.elements)
    if isinstance(node, cst.UnaryOperation):
        return _is_literal(node.expression)
    if isinstance(node, cst.BinaryOperation):
        return _is_literal(node.left) and _is_literal(node.right)
    return isinstance(node, cst.BaseNumber | cst.SimpleString) or m.matches(
        node, m.Name("True") | m.Name("False") | m.Name("None")
    )

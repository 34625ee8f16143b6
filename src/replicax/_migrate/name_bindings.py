"""Finds what each name in a program is bound to: names of TensorFlow by dotted name, the program's own by definition.

It never compares text.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeAlias, final

import libcst as cst
from libcst.metadata import (
    Assignment,
    BuiltinAssignment,
    ImportAssignment,
    MetadataWrapper,
    PositionProvider,
    Scope,
    ScopeProvider,
)

from replicax._migrate.table import standard

Function: TypeAlias = cst.FunctionDef | cst.Lambda
Chain: TypeAlias = cst.Name | cst.Attribute
Import: TypeAlias = cst.Import | cst.ImportFrom

# Nodes below which a plain name is bound, and not read.
_TARGETS: Final = (cst.AssignTarget, cst.FunctionDef, cst.ClassDef, cst.Param, cst.AsName)
_STATEMENTS: Final = (
    cst.Import, cst.ImportFrom, cst.With, cst.For, cst.While, cst.If, cst.IfExp, cst.Return, cst.AugAssign
)  # fmt: skip
_WITHOUT_NAMES: Final = frozenset(
    {cst.SimpleWhitespace, cst.ParenthesizedWhitespace, cst.TrailingWhitespace, cst.EmptyLine, cst.Comma}
)
# The beginning of a dotted name -> its form in the table. The first match counts.
_PREFIXES: Final = (
    ("tensorflow.compat.v2", "tf"),
    ("tensorflow._api.v2.v2", "tf"),
    ("tensorflow.python.keras", "tf.keras"),
    ("tensorflow.keras", "tf.keras"),
    ("tf_keras", "tf.keras"),
    ("keras", "tf.keras"),
    ("tensorflow", "tf"),
)


def canonical(dotted: str) -> str | None:
    """Returns a name of TensorFlow or Keras in the form of the table; None for a name of another package.

    >>> canonical("tensorflow.compat.v2.reduce_mean"), canonical("keras.layers.Dense"), canonical("numpy.mean")
    ('tf.reduce_mean', 'tf.keras.layers.Dense', None)
    """
    for prefix, written in _PREFIXES:
        if dotted == prefix or dotted.startswith(prefix + "."):
            return standard(written + dotted[len(prefix) :])
    return None


def parts_of(node: cst.BaseExpression) -> list[cst.Name]:
    """Returns the names of ``a.b.c``, the first one first; none for another expression."""
    names: list[cst.Name] = []
    while isinstance(node, cst.Attribute):
        names.append(node.attr)
        node = node.value
    return [node, *reversed(names)] if isinstance(node, cst.Name) else []


def names_in(target: cst.BaseExpression) -> list[str]:
    """Returns the names that the target of a loop binds: ``a`` and ``b`` in ``for a, b in pairs``."""
    if isinstance(target, cst.Tuple | cst.List):
        return [name for element in target.elements for name in names_in(element.value)]
    return [target.value] if isinstance(target, cst.Name) else []


def text_of(node: cst.BaseExpression) -> str:
    """Returns ``a.b.c`` of a chain of names; "" for anything else."""
    return ".".join(name.value for name in parts_of(node))


@final
@dataclass(frozen=True)
class ImportedName:
    """A name that an import binds.

    Attributes:
      name: The name in the program.
      dotted: The full name that the import names.
      statement: The import.
      alias: The part of the import that binds the name; None for ``import *``.
      origin: The full name of its origin: ``tensorflow`` for ``from app import tf``, if ``app`` is a module of the
        program
        that imports it.
    """

    name: str
    dotted: str
    statement: Import
    alias: cst.ImportAlias | None
    origin: str

    @property
    def is_handed_on(self) -> bool:
        """True if another module of the program imports the name, and this module imports it from there."""
        return self.origin != self.dotted


def bound_by(statement: Import, package: str = "") -> Iterator[ImportedName]:
    """Yields the names that an import binds. ``package`` is the package of the file, for relative imports."""
    module = ""
    if isinstance(statement, cst.ImportFrom):
        module = text_of(statement.module) if statement.module else ""
        if statement.relative:
            levels = package.split(".")
            above = levels[: len(levels) - len(statement.relative) + 1]
            module = ".".join([*above, module]).strip(".")
        if isinstance(statement.names, cst.ImportStar):
            yield ImportedName("*", module, statement, None, module)
            return
        module += "."
    assert not isinstance(statement.names, cst.ImportStar)
    for alias in statement.names:
        dotted = module + text_of(alias.name)
        if alias.asname is not None:
            yield ImportedName(text_of(alias.asname.name), dotted, statement, alias, dotted)
        elif isinstance(statement, cst.Import):
            first = dotted.partition(".")[0]
            yield ImportedName(first, first, statement, alias, first)
        else:
            yield ImportedName(text_of(alias.name), dotted, statement, alias, dotted)


@final
@dataclass(frozen=True)
class Definition:
    """A function or class of the program, and its module."""

    source: ParsedModule
    node: Function | cst.ClassDef


@final
@dataclass(frozen=True)
class _Assigned:
    """What a scope binds to one name. It is the same for all reads of the name there.

    Attributes:
      is_bound: True if there is any binding.
      imports: The imports.
      defined: The functions and classes.
      values: The expressions of ``name = …`` and ``name += …``.
      only: The expression of ``name = …`` if there is no other binding.
      parameter: The function whose parameter the name is, and the place of the parameter.
    """

    is_bound: bool
    imports: tuple[ImportedName, ...]
    defined: tuple[cst.FunctionDef | cst.ClassDef, ...]
    values: tuple[cst.BaseExpression, ...]
    only: cst.BaseExpression | None
    parameter: tuple[Function, int] | None


@final
class ParsedModule(cst.CSTVisitor):
    """One parsed module: its tree, and the facts that the passes need.

    Attributes:
      path: The path of the file.
      module: Its dotted name, for the folders that are packages.
      tree: The parsed text.
      code: The text.
      chains: The outermost ``a.b.c`` that are read, in order.
      attributes: All ``x.y`` that are read or assigned, including the inner ones of a chain.
      calls: All calls, in order.
      functions: All functions and lambdas.
      classes: All classes.
      strings: All literal strings except f-strings.
      bounds: The names that imports bind, in any scope.
      loops: All ``for``, including those in comprehensions.
      statements: The statements that passes use: imports, with, for, while, if, return, augmented assignments; and
        ``a if b else c``.
      parents: Node -> the node around it.
      owners: Chain, call, statement or function -> the innermost function whose body contains it; None in the
        module's body.
    """

    def __init__(self, path: Path, text: bytes | str, module: str = "") -> None:
        super().__init__()
        wrapper = MetadataWrapper(cst.parse_module(text), unsafe_skip_copy=True)
        self.path, self.module, self.tree = path, module, wrapper.module
        self.code = text if isinstance(text, str) else self.tree.code
        is_package = path.name == "__init__.py"
        self.package = module if is_package else module.rpartition(".")[0]
        self.chains: list[Chain] = []
        self.attributes: list[cst.Attribute] = []
        self.calls: list[cst.Call] = []
        self.functions: list[Function] = []
        self.strings: list[cst.SimpleString] = []
        self.integers: list[cst.Integer] = []
        self.classes: list[cst.ClassDef] = []
        self.statements: list[cst.CSTNode] = []
        self.loops: list[cst.For | cst.CompFor] = []
        self.parents: dict[cst.CSTNode, cst.CSTNode] = {}
        self.owners: dict[cst.CSTNode, Function | None] = {}
        self._lists: dict[type, list[Any]] = {
            cst.Attribute: self.attributes,
            cst.Call: self.calls,
            cst.FunctionDef: self.functions,
            cst.Lambda: self.functions,
            cst.ClassDef: self.classes,
            cst.SimpleString: self.strings,
            cst.Integer: self.integers,
        } | dict.fromkeys(_STATEMENTS, self.statements)
        self._around: list[cst.CSTNode] = []
        self._bodies: list[Function] = []
        self._scopes = wrapper.resolve(ScopeProvider)
        self._positions = wrapper.resolve(PositionProvider)
        self._resolved: dict[cst.CSTNode, str | None] = {}
        self._assigned: dict[tuple[Scope, str], _Assigned] = {}
        self._definitions: dict[cst.CSTNode, Definition | None] = {}
        self._members: dict[tuple[cst.ClassDef, str, int], Definition | None] = {}
        self._methods: dict[cst.CSTNode, dict[str, cst.FunctionDef]] = {}
        self.tree.visit(self)
        self.bounds = [
            bound
            for statement in self.statements
            if isinstance(statement, Import)
            for bound in bound_by(statement, self.package)
        ]
        self._bounds_of: dict[cst.CSTNode, list[ImportedName]] = {}
        self._attributes: dict[tuple[cst.ClassDef | None, str], list[cst.BaseExpression]] | None = None
        self.program = Program([self])

    def follow_imports(self) -> None:
        """Finds the origins of imported names. Call it once the other modules of the program are known."""
        self._resolved.clear()
        self.bounds = [replace(bound, origin=self.program.origin(bound.dotted)) for bound in self.bounds]
        self._bounds_of.clear()
        for bound in self.bounds:
            self._bounds_of.setdefault(bound.statement, []).append(bound)
        for cache in (self._resolved, self._assigned, self._definitions, self._members):
            cache.clear()  # the search for origins has filled them

    def bounds_of(self, statement: cst.CSTNode) -> Sequence[ImportedName]:
        """Returns the names that an import binds."""
        return self._bounds_of.get(statement, ())

    def exported(self, name: str) -> ImportedName | None:
        """Returns the import that gives the module itself a name, which other modules may import from it."""
        for bound in self.bounds:
            if self.owners[bound.statement] is None and bound.name == name:
                return bound
        return self._by_star(name)

    def _by_star(self, name: str) -> ImportedName | None:
        """Returns the import of TensorFlow or Keras behind a name that ``import *`` of a module of the program
        brings.
        """
        for star in self.bounds:
            module = self.program.module(star.dotted) if star.alias is None else None
            if module is None or module is self or name.startswith("_") or self.owners[star.statement]:
                continue
            dotted = f"{star.dotted}.{name}"
            origin = self.program.origin(dotted)
            if canonical(origin):
                return ImportedName(name, dotted, star.statement, None, origin)
        return None

    def assigned(self, name: str) -> str | None:
        """Returns the full name of the value that the module assigns to a name: ``tensorflow.keras`` for ``keras =
        tf.keras``.
        """
        for chain in self.chains:
            statement = self.parents[chain]
            if not isinstance(statement, cst.Assign) or self.owners[chain] is not None:
                continue
            if any(text_of(target.target) == name for target in statement.targets):
                return self.full_name(chain)
        return None

    # The walk over the tree.

    def on_visit(self, node: cst.CSTNode) -> bool:
        parent = self._around[-1] if self._around else node
        self.parents[node] = parent
        kind = type(node)
        if kind in _WITHOUT_NAMES:
            return False
        self._around.append(node)
        if kind is cst.For or kind is cst.CompFor:
            self.loops.append(node)  # type: ignore[arg-type]
            self.owners[node] = self._bodies[-1] if self._bodies else None
        if kind in self._lists:
            self._lists[kind].append(node)
            self.owners[node] = self._bodies[-1] if self._bodies else None
        if (kind is cst.Name or kind is cst.Attribute) and self._is_chain(node, parent):
            self.chains.append(node)  # type: ignore[arg-type]
            self.owners[node] = self._bodies[-1] if self._bodies else None
        return True

    def _is_chain(self, node: Any, parent: cst.CSTNode) -> bool:
        if isinstance(parent, cst.Attribute) or node not in self._scopes or not parts_of(node):
            return False
        return not (isinstance(node, cst.Name) and isinstance(parent, _TARGETS))

    def on_leave(self, original_node: cst.CSTNode) -> None:
        if self._around[-1] is original_node:
            self._around.pop()

    def on_visit_attribute(self, node: cst.CSTNode, attribute: str) -> None:
        if attribute == "body" and isinstance(node, cst.FunctionDef | cst.Lambda):
            self._bodies.append(node)

    def on_leave_attribute(self, original_node: cst.CSTNode, attribute: str) -> None:
        if attribute == "body" and isinstance(original_node, cst.FunctionDef | cst.Lambda):
            self._bodies.pop()

    # Bindings of names.

    def line_of(self, node: cst.CSTNode) -> int:
        """Returns the line on which a node begins."""
        return self._positions[node].start.line

    def column_of(self, node: cst.CSTNode) -> int:
        """Returns the column at which a node begins."""
        return self._positions[node].start.column

    def around(self, node: cst.CSTNode) -> Iterator[cst.CSTNode]:
        """Yields the nodes around a node, the innermost first."""
        while self.parents[node] is not node:
            node = self.parents[node]
            yield node

    def function_around(self, node: cst.CSTNode) -> Function | None:
        """Returns the innermost function whose body contains a node."""
        inner = node
        for outer in self.around(node):
            if isinstance(outer, cst.FunctionDef | cst.Lambda) and outer.body is inner:
                return outer
            inner = outer
        return None

    def class_around(self, node: cst.CSTNode) -> cst.ClassDef | None:
        """Returns the innermost class around a node."""
        return next((outer for outer in self.around(node) if isinstance(outer, cst.ClassDef)), None)

    def scope_of(self, node: cst.CSTNode) -> Scope:
        scope = self._scopes.get(node)
        assert scope is not None, node
        return scope

    def is_bound(self, node: cst.CSTNode) -> bool:
        """True for a name that is read as a variable; False for an attribute, a keyword, or part of an import."""
        return node in self._scopes

    def names_assigned(self) -> set[str]:
        """Returns the names that the module binds in any scope, except by imports."""
        scopes = {scope for scope in self._scopes.values() if scope is not None}
        return {
            assignment.name
            for scope in scopes
            for assignment in scope.assignments
            if not isinstance(assignment, ImportAssignment | BuiltinAssignment)
        }

    def binding(self, name: cst.Name) -> ImportedName | None:
        """Returns the import that binds a name, the first one if there are several; None if it is bound in another
        way.
        """
        return min(self.bindings(name), key=lambda bound: self.line_of(bound.statement), default=None)

    def bindings(self, name: cst.Name) -> list[ImportedName]:
        """Returns all imports that bind a name, such as those of ``try`` and ``except ImportError``."""
        return list(self._assigned_to(name).imports)

    def _assigned_to(self, name: cst.Name) -> _Assigned:
        """Returns what the scope of a name binds to it. A name that is assigned many times is looked at once."""
        key = self.scope_of(name), name.value
        if key not in self._assigned:
            self._assigned[key] = self._find_assigned(*key)
        return self._assigned[key]

    def _find_assigned(self, scope: Scope, name: str) -> _Assigned:
        assignments = scope[name]
        imports: list[ImportedName] = []
        defined: list[cst.FunctionDef | cst.ClassDef] = []
        values: list[cst.BaseExpression] = []
        parameter: tuple[Function, int] | None = None
        only: cst.BaseExpression | None = None
        for assignment in assignments:
            if not isinstance(assignment, Assignment):
                continue
            node = assignment.node
            if isinstance(node, Import):
                imports += [bound for bound in self.bounds_of(node) if bound.name == name]
            elif isinstance(node, cst.FunctionDef | cst.ClassDef):
                defined.append(node)
            elif isinstance(node, cst.Param):
                parameter = parameter or self._place_of(node)
            target = self.parents.get(node)
            statement = self.parents[target] if isinstance(target, cst.AssignTarget) else target
            if isinstance(statement, cst.Assign | cst.AugAssign):
                values.append(statement.value)
                is_only = len(assignments) == 1 and isinstance(statement, cst.Assign)
                only = statement.value if is_only else None
        if not assignments:
            by_star = self._by_star(name)
            imports += [by_star] if by_star else []
        return _Assigned(bool(assignments), tuple(imports), tuple(defined), tuple(values), only, parameter)

    def _place_of(self, parameter: cst.Param) -> tuple[Function, int] | None:
        function = next(n for n in self.around(parameter) if isinstance(n, cst.FunctionDef | cst.Lambda))
        places = [*function.params.posonly_params, *function.params.params, *function.params.kwonly_params]
        return (function, places.index(parameter)) if parameter in places else None

    def value_of(self, name: cst.Name) -> cst.BaseExpression | None:
        """Returns the expression that a name is assigned, if it is assigned once, by ``name = …``."""
        return self._assigned_to(name).only

    def values_of(self, name: cst.Name) -> Sequence[cst.BaseExpression]:
        """Returns every expression that ``name = …`` or ``name += …`` assigns to it in its scope."""
        return self._assigned_to(name).values

    def variable(self, node: cst.CSTNode) -> Hashable:
        """Returns a key that is the same for all reads of one variable; for any other expression, the node."""
        return (
            (self.scope_of(node), node.value) if isinstance(node, cst.Name) and self.is_bound(node) else node
        )

    def values(self, node: cst.BaseExpression) -> Iterator[cst.BaseExpression]:
        """Yields every expression that a name, or an attribute of ``self``, is assigned."""
        if isinstance(node, cst.Name) and self.is_bound(node):
            yield from self.values_of(node)
        elif text_of(node).startswith("self."):
            class_ = self.class_around(node)
            if class_ is not None:
                yield from self.attributes_of(class_, text_of(node).removeprefix("self."))

    def parameter_of(self, name: cst.Name) -> tuple[Function, int] | None:
        """Returns the function whose parameter a name is, and the place of the parameter."""
        return self._assigned_to(name).parameter

    def full_name(self, node: cst.BaseExpression) -> str | None:
        """Returns the full name that imports and plain assignments bind a chain to, such as
        ``tensorflow.reduce_mean``.
        """
        if node not in self._resolved:
            self._resolved[node] = None  # ends the recursion for `x = x.y`
            self._resolved[node] = self._full_name(node)
        return self._resolved[node]

    def _full_name(self, node: cst.BaseExpression) -> str | None:
        parts = parts_of(node)
        if not parts or not self.is_bound(parts[0]):
            return None
        bound = self.binding(parts[0])
        root = bound.origin if bound else None
        if bound is None:
            value = self.value_of(parts[0])
            root = self.full_name(value) if value is not None else None
        return self.program.origin(".".join([root, *(part.value for part in parts[1:])])) if root else None

    def handed_on_by(self, node: cst.BaseExpression) -> ImportedName | None:
        """Returns the import of another module through which a chain such as ``common.tf.data`` leads."""
        parts = parts_of(node)
        bound = self.binding(parts[0]) if parts and self.is_bound(parts[0]) else None
        if (
            bound is None or bound.alias is None or bound.is_handed_on
        ):  # the module will import such a name itself
            return None
        return self.program.handed_on_by(".".join([bound.dotted, *(part.value for part in parts[1:])]))

    def is_assigned_elsewhere(self, node: cst.BaseExpression) -> bool:
        """True for ``module.square`` if that module has ``square = tf.square``."""
        parts = parts_of(node)
        bound = self.binding(parts[0]) if parts and self.is_bound(parts[0]) else None
        if bound is None or bound.alias is None:
            return False
        return self.program.is_assigned(".".join([bound.dotted, *(part.value for part in parts[1:])]))

    def dotted(self, node: cst.BaseExpression) -> str | None:
        """Returns a chain's name in the table, such as ``tf.reduce_mean``; None for other chains."""
        name = self.full_name(node)
        return canonical(name) if name else None

    # Functions and classes of the program.

    def definition(self, node: cst.BaseExpression) -> Definition | None:
        """Returns the function or class of the program that an expression names; for an object, its class."""
        if node not in self._definitions:
            self._definitions[node] = self._definition(node, 6)
        return self._definitions[node]

    def definitions(self, node: cst.BaseExpression) -> list[Definition]:
        """Returns all definitions that an expression may name, such as a function that both branches of an ``if``
        define.
        """
        found = self.definition(node)
        if found is None or not isinstance(node, cst.Name) or found.source is not self:
            return [found] if found else []
        return list(self._defined(node)) or [found]

    def _defined(self, name: cst.Name) -> Iterator[Definition]:
        """Yields the functions and classes that have a name in its scope."""
        yield from (Definition(self, node) for node in self._assigned_to(name).defined)

    def _definition(self, node: cst.BaseExpression, depth: int) -> Definition | None:
        if depth == 0:
            return None
        if isinstance(node, cst.Lambda):
            return Definition(self, node)
        if isinstance(node, cst.Call):
            made = self._definition(node.func, depth - 1)
            return made if made and isinstance(made.node, cst.ClassDef) else None
        if isinstance(node, cst.Attribute):
            name = self.full_name(node)
            found = self.program.find(name) if name else None
            return found or self._member(node, depth)
        if not isinstance(node, cst.Name) or not self.is_bound(node):
            return None
        bound = self.binding(node)
        if bound is not None:
            return self.program.find(bound.dotted)
        defined = next(self._defined(node), None)
        if defined is not None:
            return defined
        value = self.value_of(node)
        if value is not None:
            return self._definition(value, depth - 1)
        return None if self._assigned_to(node).is_bound else self.by_star(node.value)

    def by_star(self, name: str) -> Definition | None:
        """Returns the function or class of the program behind a name that ``import *`` brings."""
        for star in self.bounds:
            module = self.program.module(star.dotted) if star.alias is None else None
            if module is not None and module is not self:
                found = self.program.find(f"{star.dotted}.{name}")
                if found is not None:
                    return found
        return None

    def _member(self, node: cst.Attribute, depth: int) -> Definition | None:
        """Returns the member for ``self.step``, or for ``trainer.step`` if the class of ``trainer`` is known."""
        if isinstance(node.value, cst.Name) and node.value.value in ("self", "cls"):
            around = self.class_around(node)
            owner = Definition(self, around) if around else None
        else:
            owner = self._definition(node.value, depth - 1)
        if owner is None or not isinstance(owner.node, cst.ClassDef):
            return None
        return owner.source.member(owner.node, node.attr.value, depth)

    def member(self, class_: cst.ClassDef, name: str, depth: int = 6) -> Definition | None:
        """Returns the method of a class or its bases, or the class of the object that ``self.name = …`` assigns."""
        key = class_, name, depth
        if depth and key not in self._members:
            self._members[key] = None  # ends the recursion for `self.x = self.x.y`
            self._members[key] = self._find_member(class_, name, depth)
        return self._members.get(key)

    def _find_member(self, class_: cst.ClassDef, name: str, depth: int) -> Definition | None:
        method = self._methods_of(class_).get(name)
        if method is not None:
            return Definition(self, method)
        for base in class_.bases:
            known = self._definition(base.value, depth - 1)
            if known and isinstance(known.node, cst.ClassDef):
                found = known.source.member(known.node, name, depth - 1)
                if found:
                    return found
        for assignment in self.attributes_of(class_, name):
            found = self._definition(assignment, depth - 1)
            if found:
                return found
        return None

    def _methods_of(self, class_: cst.ClassDef) -> Mapping[str, cst.FunctionDef]:
        if not self._methods:
            for function in self.functions:
                around = self.class_around(function)
                if around is None or self.owners[function] is not self.owners[around]:
                    continue
                if isinstance(function, cst.FunctionDef):
                    self._methods.setdefault(around, {}).setdefault(function.name.value, function)
        return self._methods.get(class_, {})

    def attributes_of(self, class_: cst.ClassDef, name: str) -> Iterator[cst.BaseExpression]:
        """Yields every expression that ``self.name = …`` assigns in a class."""
        if self._attributes is None:
            self._attributes = {}
            for chain in self.chains:
                target = self.parents[chain]
                first, _, attribute = text_of(chain).partition(".")
                if first == "self" and attribute and isinstance(target, cst.AssignTarget):
                    statement, around = self.parents[target], self.class_around(chain)
                    if isinstance(statement, cst.Assign):
                        self._attributes.setdefault((around, attribute), []).append(statement.value)
        yield from self._attributes.get((class_, name), ())

    def bases(self, class_: cst.ClassDef, depth: int = 6) -> Iterator[str]:
        """Yields the names of the table among the bases of a class, and among their bases."""
        for base in class_.bases:
            name = self.dotted(base.value)
            if name:
                yield name
            known = self._definition(base.value, depth - 1) if depth else None
            if known and isinstance(known.node, cst.ClassDef):
                yield from known.source.bases(known.node, depth - 1)


@final
class Program:
    """All modules that are given at once. Names lead from one to another."""

    def __init__(self, sources: Sequence[ParsedModule]) -> None:
        self.sources = list(sources)
        self._modules: dict[str, list[ParsedModule]] = {}
        self._origins: dict[str, str] = {}
        self._found: dict[str, Definition | None] = {}
        for source in sources:
            parts = source.module.split(".")
            for start in range(
                len(parts)
            ):  # a package may be in a folder from which a shorter name imports it
                self._modules.setdefault(".".join(parts[start:]), []).append(source)
        for source in sources:
            source.program = self
        for source in sources:
            source.follow_imports()

    def origin(self, dotted: str) -> str:
        """Returns the origin of a name: ``tensorflow.nn`` for ``app.tf.nn``, if the module ``app`` imports it."""
        if dotted not in self._origins:
            self._origins[dotted] = dotted  # a circle of imports ends here
            self._origins[dotted] = self._origin(dotted)
        return self._origins[dotted]

    def _origin(self, dotted: str) -> str:
        module, name, rest = self._through(dotted)
        if module is None:
            return dotted
        bound = module.exported(name)
        above = self.origin(bound.dotted) if bound else module.assigned(name)
        return self.origin(f"{above}{rest}") if above and canonical(above) else dotted

    def _through(self, dotted: str) -> tuple[ParsedModule | None, str, str]:
        """Returns the module of the program that a dotted name leads through, the name in it, and the rest."""
        parts = dotted.split(".")
        if self.module(dotted) is None:
            for length in range(len(parts) - 1, 0, -1):
                module = self.module(".".join(parts[:length]))
                if module is not None:
                    return module, parts[length], "".join(f".{part}" for part in parts[length + 1 :])
        return None, "", ""

    def handed_on_by(self, dotted: str) -> ImportedName | None:
        """Returns the import of a module of the program from which another module has a name."""
        module, name, _ = self._through(dotted)
        return module.exported(name) if module else None

    def is_assigned(self, dotted: str) -> bool:
        """True for a name to which a module of the program assigns a TensorFlow object."""
        module, name, _ = self._through(dotted)
        return module is not None and module.exported(name) is None and module.assigned(name) is not None

    def module(self, dotted: str) -> ParsedModule | None:
        """Returns the module that an import names, if the program has exactly one of that name."""
        found = self._modules.get(dotted, [])
        return found[0] if len(found) == 1 else None

    def find(self, dotted: str) -> Definition | None:
        """Returns the function, class or method of that dotted name."""
        if dotted not in self._found:
            self._found[dotted] = None  # a circle of imports ends here
            self._found[dotted] = self._find(dotted)
        return self._found[dotted]

    def _find(self, dotted: str) -> Definition | None:
        module, _, name = dotted.rpartition(".")
        source = self.module(module) if module else None
        if source is not None:
            for node in (*source.functions, *source.classes):
                if isinstance(node, cst.Lambda) or node.name.value != name:
                    continue
                if source.owners[node] is None and source.class_around(node) is None:
                    return Definition(source, node)
            others = [
                bound.dotted for bound in source.bounds if bound.name == name and bound.dotted != dotted
            ]
            return self.find(others[0]) if others else source.by_star(name)  # imported there from elsewhere
        if "." in module:
            owner = self.find(module)
            if owner and isinstance(owner.node, cst.ClassDef):
                return owner.source.member(owner.node, name)
        return None

    def imported_by(self, source: ParsedModule) -> Iterator[ParsedModule]:
        """Yields the modules of the program that a module imports, if it imports TensorFlow's names directly."""
        for bound in source.bounds:
            if bound.is_handed_on and canonical(bound.origin):
                continue
            for name in (bound.dotted, bound.dotted.rpartition(".")[0]):
                found = self.module(name)
                if found is not None and found is not source:
                    yield found

    def all_below(self, source: ParsedModule) -> set[ParsedModule]:
        """Returns a module and the modules of the program that it imports, directly or indirectly."""
        found, waiting = {source}, [source]
        while waiting:
            new = set(self.imported_by(waiting.pop())) - found
            found |= new
            waiting += new
        return found

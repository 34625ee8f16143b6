"""Imports of a module: those to remove, move or add, and the variable KERAS_BACKEND before Keras is imported."""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from typing import Any, Final, final

import libcst as cst

from replicax._migrate import table
from replicax._migrate.name_bindings import (
    Import,
    ImportedName,
    ParsedModule,
    bound_by,
    canonical,
    parts_of,
    text_of,
)

# Names below these mean the same in every context, so their imports move.
MOVED: Final = ("tf.distribute", "tf.keras")
_BACKEND: Final = 'os.environ.setdefault("KERAS_BACKEND", "jax")'


def is_below(name: str | None, *prefixes: str) -> bool:
    """True for ``tf.keras`` and the names in it, if ``tf.keras`` is a prefix."""
    return name is not None and any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def moved_name(dotted: str) -> str | None:
    """Returns the full name that an import of a name of the table imports now; None if it cannot move.

    >>> moved_name("tf.keras.layers"), moved_name("tf.float32")
    ('keras.layers', None)
    """
    found = table.find(dotted) if is_below(dotted, *MOVED) else None
    row = next((row for row in found.rows if row.kind == "change"), None) if found else None
    name = row.bare(keras=True) if row else None
    if found is None or name is None:
        return None
    root, _, rest = f"{name}.{found.rest}".strip(".").partition(".")
    if root not in table.ROOTS:
        return None
    return f"{_of_root(root).dotted}.{rest}".strip(".")


def _of_root(root: str) -> ImportedName:
    """Returns the name that the import of a root binds."""
    (line,) = cst.parse_module(table.ROOTS[root]).body
    assert isinstance(line, cst.SimpleStatementLine)
    (statement,) = line.body
    assert isinstance(statement, Import)
    (bound,) = bound_by(statement)
    return bound


@final
class Imports:
    """The imports of a module after its names have changed.

    Args:
      source: The module.
      roots: The names of ``table.ROOTS`` that it uses now.
      used: The imports that are still used.
      freed: The names whose assignment is removed.
      needs_backend: True if it must set KERAS_BACKEND.
      before_random: The first statement of the module that draws random numbers. Their generator is made before it.

    Attributes:
      local: Root -> its name in the module.
    """

    def __init__(
        self,
        source: ParsedModule,
        roots: Iterable[str],
        used: Set[ImportedName],
        freed: set[str],
        *,
        needs_backend: bool,
        before_random: cst.CSTNode | None = None,
    ) -> None:
        self._source, self._used = source, set(used)
        self.local: dict[str, str] = {}
        self._new: list[str] = []
        self._now = [(bound, self._full_name(bound)) for bound in source.bounds]
        assigned = source.names_assigned() - freed
        for root in table.ROOTS:
            if root in roots and root != table.RANDOM:
                self._bind(root, assigned)
        self._before_random = before_random
        self.local[table.RANDOM] = table.RANDOM + "_" * (table.RANDOM in assigned)
        body = source.tree.body
        stars = {
            bound.statement
            for chain in source.chains
            for bound in source.bindings(parts_of(chain)[0])
            if bound.alias is None
        }
        self._tensorflow = [
            s
            for s in body
            if any(canonical(bound.origin) or bound.statement in stars for bound in self._below(s))
        ]
        after = [s for s in body if not self._is_first(s)]
        self._anchor = (self._tensorflow or after or body)[0] if body else None
        self._backend_anchor = None
        if needs_backend and "KERAS_BACKEND" not in source.code:
            needing = (s for s in body if any(self._needs_backend(bound) for bound in self._below(s)))
            self._backend_anchor = next(needing, None)

    def _full_name(self, bound: ImportedName) -> str:
        name = canonical(bound.origin)
        return (moved_name(name) if name else None) or bound.origin

    def _bind(self, root: str, assigned: set[str]) -> None:
        """Chooses the name for a root: that of an existing import, else the usual name, else a free one."""
        wanted = _of_root(root)
        taken = set(assigned)
        for bound, now in self._now:
            if now != wanted.dotted:
                taken.add(bound.name)
            elif bound.alias and self._is_above_uses(bound.statement):
                self.local[root] = bound.name
                self._used.add(bound)
                return
        name = wanted.name if wanted.name not in taken else wanted.dotted.replace(".", "_")
        while name in taken:
            name += "_"
        self.local[root] = name
        statement = table.ROOTS[root]
        self._new.append(statement if name == wanted.name else f"{statement.partition(' as ')[0]} as {name}")

    def _is_above_uses(self, statement: cst.CSTNode) -> bool:
        """True for an import of the module that comes before its uses of TensorFlow."""
        source = self._source
        uses = (chain for chain in source.chains if source.owners[chain] is None and source.dotted(chain))
        first = min(map(source.line_of, uses), default=None)
        is_above = first is None or source.line_of(statement) <= first
        return source.parents[statement] in source.tree.body and is_above

    def _below(self, statement: cst.CSTNode) -> list[ImportedName]:
        return [
            bound
            for bound in self._source.bounds
            if self._source.owners[bound.statement] is None
            and statement in self._source.around(bound.statement)
        ]

    def _is_first(self, statement: cst.CSTNode) -> bool:
        """True for the docstring and imports of ``__future__``, before which no other statement may be."""
        if not isinstance(statement, cst.SimpleStatementLine):
            return False
        first = statement.body[0]
        if isinstance(first, cst.ImportFrom):
            return first.module is not None and text_of(first.module) == "__future__"
        return isinstance(first, cst.Expr) and isinstance(first.value, cst.BaseString)

    def _needs_backend(self, bound: ImportedName) -> bool:
        """True for TensorFlow, which imports Keras, and for modules of the program, which may import it."""
        package = bound.origin.partition(".")[0]
        if package in ("keras", "replicax") or package.startswith(("tensorflow", "tf_")):
            return True
        modules = (bound.dotted, bound.dotted.rpartition(".")[0])
        return any(self._source.program.module(name) for name in modules)

    def apply(self, statement: cst.CSTNode, updated: cst.BaseStatement) -> list[cst.BaseStatement]:
        """Returns the statements that replace one, with the new imports beside it."""
        above = _leading(
            statement
        )  # goes above the first line; marks, which follow it, stay with their lines
        marked = updated.with_changes(leading_lines=_leading(updated)[len(above) :])
        result: list[cst.BaseStatement] = [marked]
        if isinstance(statement, cst.SimpleStatementLine) and isinstance(marked, cst.SimpleStatementLine):
            result = list(self._edited(statement, marked))
        if statement is self._anchor:
            new = [_line(text) for text in self._new]
            if new and not result:
                new[0] = new[0].with_changes(trailing_whitespace=_trailing(updated))
            is_import = isinstance(statement, cst.SimpleStatementLine) and not self._new_goes_first()
            result = [*result, *new] if is_import else [*new, *result]
        if statement is self._backend_anchor:
            result = [*self._backend_lines(statement), *_spaced(result)]
        if result:
            result[0] = result[0].with_changes(leading_lines=[*above, *_leading(result[0])])
        if statement is self._before_random:
            made = table.ROOTS[table.RANDOM].partition(" = ")[2].replace("keras", self.local["keras"], 1)
            line = f"{self.local[table.RANDOM]} = {made}"
            result = [*_spaced([_line(line)]), *result]
        return result

    def _new_goes_first(self) -> bool:
        return self._anchor not in self._tensorflow

    def _backend_lines(self, anchor: cst.CSTNode) -> list[cst.BaseStatement]:
        body = list(self._source.tree.body)
        above = [bound.name for s in body[: body.index(anchor)] for bound in self._below(s)]  # type: ignore[arg-type]
        backend = _spaced([_line(_BACKEND)])
        return backend if "os" in above else [_line("import os"), *backend]

    def _edited(
        self, statement: cst.SimpleStatementLine, updated: cst.SimpleStatementLine
    ) -> Iterable[cst.SimpleStatementLine]:
        """Returns a line of imports without removed ones, and with moved ones."""
        imports = [small for small in statement.body if isinstance(small, Import)]
        if not any(
            canonical(bound.origin) or self._by_star(small)
            for small in imports
            for bound in self._source.bounds_of(small)
        ):
            return [updated]
        small_statements: list[cst.BaseSmallStatement] = []
        for small, now in zip(statement.body, updated.body):
            small_statements += self._edited_import(small) if isinstance(small, Import) else [now]
        if len(statement.body) > 1 and len(small_statements) == len(statement.body):
            return [updated.with_changes(body=small_statements)]
        lines = [
            cst.SimpleStatementLine([small.with_changes(semicolon=cst.MaybeSentinel.DEFAULT)])
            for small in small_statements
        ]
        if lines:
            lines[0] = lines[0].with_changes(leading_lines=updated.leading_lines)
            lines[-1] = lines[-1].with_changes(trailing_whitespace=updated.trailing_whitespace)
        return lines

    def _edited_import(self, statement: Import) -> list[Import]:
        stays: list[cst.ImportAlias] = []
        direct: list[Import] = []
        moved: list[
            tuple[cst.ImportAlias, str, str]
        ] = []  # with the module to import from, and the name there
        for bound in self._source.bounds_of(statement):
            name = canonical(bound.origin)
            target = moved_name(name) if name else None
            if bound.alias is None:
                by_star = [self._direct(other) for other in self._by_star(statement)]
                return [_from(statement, target) if target else statement, *by_star]
            if target and isinstance(statement, cst.Import) and bound.alias.asname is None:
                target = None  # `import tensorflow.keras` binds tensorflow
            if target:
                module, _, last = target.rpartition(".")
                moved.append((bound.alias, module, last))
            elif bound.is_handed_on and name and bound in self._used:
                direct.append(self._direct(bound))
            elif name is None or bound in self._used or is_below(bound.dotted, "keras"):
                stays.append(bound.alias)
        result: list[Import] = direct
        if stays:
            result.append(
                statement if len(stays) == len(_aliases(statement)) else _with_names(statement, stays)
            )
        for module in dict.fromkeys(module for _, module, _ in moved):
            aliases = [_renamed(alias, last) for alias, m, last in moved if m == module]
            if not module:
                result += [cst.Import([_bare(alias)]) for alias in aliases]
            elif isinstance(statement, cst.ImportFrom):
                result.append(_from(_with_names(statement, aliases), module))
            else:
                name = cst.parse_expression(module)
                assert isinstance(name, cst.Name | cst.Attribute)
                result += [cst.ImportFrom(name, [_bare(alias)]) for alias in aliases]
        return result

    def _by_star(self, statement: Import) -> list[ImportedName]:
        """Returns the used names of TensorFlow that ``import *`` brings, because the module of their origin may drop
        them.
        """
        used = {bound for bound in self._used if bound.statement is statement and bound.name != "*"}
        return sorted((b for b in used if b.alias is None), key=lambda bound: bound.name)

    def _direct(self, bound: ImportedName) -> Import:
        """Returns the direct import of a name that another module of the program imported."""
        name = canonical(bound.origin)
        target = (moved_name(name) if name else None) or bound.origin
        package, _, last = target.rpartition(".")
        text = f"from {package} import {last}" if package else f"import {last}"
        (statement,) = _line(text if last == bound.name else f"{text} as {bound.name}").body
        assert isinstance(statement, Import)
        return statement


def _aliases(statement: Import) -> Sequence[cst.ImportAlias]:
    assert not isinstance(statement.names, cst.ImportStar)
    return statement.names


def _with_names(statement: Import, aliases: Sequence[cst.ImportAlias]) -> Import:
    last = aliases[-1].with_changes(comma=_aliases(statement)[-1].comma)
    return statement.with_changes(names=[*aliases[:-1], last])


def _renamed(alias: cst.ImportAlias, name: str) -> cst.ImportAlias:
    """Returns the same binding, imported from another place."""
    bound = text_of(alias.asname.name) if alias.asname else text_of(alias.name)
    if bound == name:
        return alias.with_changes(name=cst.Name(name), asname=None)
    return alias.with_changes(name=cst.Name(name), asname=cst.AsName(cst.Name(bound)))


def _bare(alias: cst.ImportAlias) -> cst.ImportAlias:
    return alias.with_changes(comma=cst.MaybeSentinel.DEFAULT)


def _from(statement: Import, module: str | None) -> cst.ImportFrom:
    expression = cst.parse_expression(module or "")
    assert isinstance(expression, cst.Name | cst.Attribute)
    return statement.with_changes(module=expression, relative=())  # type: ignore[return-value]


def _line(text: str) -> cst.SimpleStatementLine:
    line = cst.parse_statement(text)
    assert isinstance(line, cst.SimpleStatementLine)
    return line


def _trailing(line: cst.BaseStatement) -> cst.TrailingWhitespace:
    """Returns the whitespace behind a line, which may have a comment."""
    assert isinstance(line, cst.SimpleStatementLine)
    return line.trailing_whitespace


def _leading(line: Any) -> Sequence[cst.EmptyLine]:
    """Returns the empty lines and comments above a statement."""
    return line.leading_lines


def _spaced(lines: Sequence[cst.BaseStatement]) -> list[cst.BaseStatement]:
    """Returns the lines with an empty line above them."""
    if not lines:
        return []
    above = [cst.EmptyLine(indent=False), *_leading(lines[0])]
    return [lines[0].with_changes(leading_lines=above), *lines[1:]]

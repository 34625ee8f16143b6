"""Marks as comments: writes them above statements, finds them again, and drops those that ``ok`` silences."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, TypeAlias, final

import libcst as cst

from replicax._migrate.name_bindings import ParsedModule

_SIGN: Final = "# replicax migrate:"
_MORE: Final = "#   "
_WIDTH: Final = 110

# Rules of marks that speak of a whole module.
ONCE: Final = frozenset({"int64"})

# Statements, and parts of them, that can have a comment above them.
Commented: TypeAlias = (
    cst.SimpleStatementLine | cst.FunctionDef | cst.ClassDef | cst.With | cst.For | cst.While | cst.If | cst.Try
    | cst.TryStar | cst.Match | cst.Decorator | cst.Else | cst.ExceptHandler | cst.Finally
)  # fmt: skip


@final
@dataclass(frozen=True)
class Mark:
    """A place that a person has to check.

    Attributes:
      rule: A word that groups marks.
      what: The problem, without a full stop.
      write: The code to write instead; may be empty.
      line: The line.
      is_new: False if the comment was there before.
    """

    rule: str
    what: str
    write: str
    line: int
    is_new: bool = True

    @property
    def text(self) -> str:
        return ". ".join(part for part in (self.what, self.write[:1].upper() + self.write[1:]) if part) + "."


@final
class Comments:
    """The marks of one module, as comments of its statements."""

    def __init__(self, source: ParsedModule) -> None:
        self._source = source
        self._wanted: dict[cst.CSTNode, list[Mark]] = {}
        self._earlier = [mark for mark in _standing(source.code) if mark[1] != "ok"]

    def add(self, node: cst.CSTNode, rule: str, what: str, write: str = "") -> None:
        """Marks the statement around a node, unless it has the mark or the user has silenced it.

        A mark of ``ONCE`` that stands anywhere in the module does not come again.
        """
        statement = next(
            n for n in (node, *self._source.around(node)) if isinstance(n, Commented | cst.Module)
        )
        mark = Mark(rule, what, write, self._source.line_of(node))
        texts = self._texts(statement)
        wanted = self._wanted.setdefault(statement, [])
        if "ok" in texts or any(mark.text == other.text for other in wanted):
            return
        if mark.text in texts or (rule in ONCE and any(mark.text == text for _, text in self._earlier)):
            place = next(i for i, (_, text) in enumerate(self._earlier) if text == mark.text)
            line, _ = self._earlier.pop(place)
            mark = Mark(rule, what, write, line, is_new=False)
        wanted.append(mark)

    def is_ok(self, statement: cst.CSTNode) -> bool:
        """True if the user has marked a statement as ok."""
        return "ok" in self._texts(statement)

    def marks(self) -> tuple[Mark, ...]:
        """Returns all marks by line: new ones, and existing ones."""
        wanted = [mark for marks in self._wanted.values() for mark in marks]
        earlier = [Mark("standing", text.rstrip("."), "", line, is_new=False) for line, text in self._earlier]
        return tuple(sorted([*wanted, *earlier], key=lambda mark: mark.line))

    def statements(self) -> list[cst.CSTNode]:
        """Returns the statements that have marks."""
        return list(self._wanted)

    def lines(self, statement: cst.CSTNode) -> list[cst.EmptyLine]:
        """Returns the comments to put above a statement."""
        new = [mark for mark in self._wanted.get(statement, ()) if mark.is_new]
        width = max(40, _WIDTH - self._source.column_of(statement)) if new else 0
        lines = [
            line
            for mark in new
            for line in textwrap.wrap(
                f"{_SIGN} {mark.text}",
                width,
                subsequent_indent=_MORE,
                break_long_words=False,
                break_on_hyphens=False,
            )
        ]
        return [cst.EmptyLine(comment=cst.Comment(line)) for line in lines]

    def _texts(self, statement: cst.CSTNode) -> list[str]:
        """Returns the marks above a statement or behind it."""
        if not isinstance(statement, Commented):
            return []
        lines = list(statement.leading_lines)
        if self._source.tree.body and statement is self._source.tree.body[0]:
            lines = [*self._source.tree.header, *lines]
        if isinstance(statement, cst.SimpleStatementLine):
            lines.append(cst.EmptyLine(comment=statement.trailing_whitespace.comment))
        return [
            text
            for _, text in _standing("\n".join(line.comment.value if line.comment else "" for line in lines))
        ]


def _standing(code: str) -> Iterable[tuple[int, str]]:
    """Yields line and text of the marks in a program. The text is "ok" if the user has written that."""
    found: list[tuple[int, str]] = []
    is_open = False
    for number, line in enumerate(code.splitlines(), 1):
        line = line.strip()
        if line.startswith(_SIGN):
            text = line.removeprefix(_SIGN).strip()
            found.append((number, "ok" if re.match(r"ok\b", text, re.I) else text))
            is_open = True
        elif is_open and line.startswith(_MORE):
            found[-1] = (found[-1][0], f"{found[-1][1]} {line.removeprefix(_MORE).strip()}")
        else:
            is_open = False
    return found

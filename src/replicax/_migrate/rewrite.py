"""Applies the decisions to one module. Comments and layout stay."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, final

import libcst as cst
import libcst.matchers as m

from replicax._migrate.comments import Mark
from replicax._migrate.decisions import ROOT, Change, Decisions
from replicax._migrate.imports import Imports, moved_name
from replicax._migrate.name_bindings import ImportedName, ParsedModule
from replicax._migrate.table import Row
from replicax._migrate.tapes import Taped
from replicax._migrate.templates import fill

# Nodes below which an expression needs parentheses if it is not an atom.
_TIGHT: Final = (
    cst.Attribute | cst.Subscript | cst.Call | cst.UnaryOperation | cst.BinaryOperation | cst.BooleanOperation
    | cst.Comparison | cst.ComparisonTarget | cst.Await | cst.StarredElement | cst.IfExp
)  # fmt: skip
_ATOM: Final = (
    cst.Name | cst.Attribute | cst.Call | cst.Subscript | cst.BaseString | cst.BaseNumber | cst.List | cst.Dict
    | cst.Set | cst.BaseComp
)  # fmt: skip
# A template that only renames a function and its arguments: the call keeps its layout.
_PLAIN: Final = re.compile(r"([\w.]+)\(((?:(?:\w+=)?\{\w+\}(?:, )?)*)\)")


@final
class Rewriter(cst.CSTTransformer):
    """Applies decisions to the tree of a module."""

    def __init__(self, source: ParsedModule, decisions: Decisions, imports: Imports) -> None:
        super().__init__()
        self._source, self._decisions, self._imports = source, decisions, imports
        self._top = set(source.tree.body)
        self._taped = {s: taped for taped in decisions.taped for s in taped.statements}
        self._moved: dict[Taped, list[Any]] = {}
        self._lifted: list[str] = []  # comments in replaced expressions, which move above the statement
        changed = [
            *decisions.names,
            *decisions.fillings,
            *decisions.texts,
            *decisions.wraps,
            *decisions.dropped,
            *decisions.keywords,
            *self._taped,
            *decisions.removed,
            *decisions.decorated,
            *decisions.comments.statements(),
            *source.statements,
        ]
        around = (outer for node in changed for outer in source.around(node))
        self._visited = {*changed, *around, *self._top, source.tree}

    def on_visit(self, node: cst.CSTNode) -> bool:
        return node in self._visited

    def on_leave(self, original_node: Any, updated_node: Any) -> Any:
        new = self._replaced(original_node, updated_node)
        if original_node in self._decisions.wraps:
            template = self._localized(self._decisions.wraps[original_node])
            new = cst.parse_expression(fill(template, {"self": self._code(new)}))
        return new

    def _replaced(self, original_node: Any, updated_node: Any) -> Any:
        if original_node in self._decisions.names:
            name = self._localized(self._decisions.names[original_node])
            return self._placed(original_node, cst.parse_expression(name))
        if original_node in self._decisions.fillings:
            new = self._placed(original_node, self._filled(original_node, updated_node))
            code = cst.Module([]).code_for_node(new)
            comments = [c.value for c in m.findall(updated_node, m.Comment()) if isinstance(c, cst.Comment)]
            self._lifted += [comment for comment in comments if comment not in code]
            return new
        if original_node in self._decisions.keywords:
            return self._with_keyword(updated_node, self._decisions.keywords[original_node])
        if isinstance(original_node, cst.Call) and self._decisions.dropped.intersection(original_node.args):
            return self._without_dropped(original_node, updated_node)
        if original_node in self._decisions.texts:
            return cst.parse_expression(self._decisions.texts[original_node])
        if original_node in self._decisions.removed:
            return cst.RemoveFromParent()
        if original_node in self._decisions.decorated:
            function = cst.Attribute(cst.Name(self._imports.local["rx"]), cst.Name("function"))
            updated_node = updated_node.with_changes(decorators=[cst.Decorator(function)])
        if lines := self._decisions.comments.lines(original_node):
            updated_node = updated_node.with_changes(leading_lines=[*updated_node.leading_lines, *lines])
        if self._lifted and isinstance(original_node, cst.SimpleStatementLine):
            lifted = [cst.EmptyLine(comment=cst.Comment(comment)) for comment in self._lifted]
            updated_node = updated_node.with_changes(leading_lines=[*updated_node.leading_lines, *lifted])
            self._lifted = []
        statements = [updated_node]
        if original_node in self._top or isinstance(original_node, cst.SimpleStatementLine):
            if original_node in self._taped:
                statements = self._moved_out(original_node, updated_node)
            else:
                statements = self._imports.apply(original_node, updated_node)
            above = [t for t in self._decisions.taped if t.above is original_node and t in self._moved]
            if above:
                statements = self._with_functions(above, statements)
        elif original_node in self._taped:
            statements = self._moved_out(original_node, updated_node)
        if statements == [updated_node]:
            return updated_node
        return cst.FlattenSentinel(statements) if statements else cst.RemoveFromParent()

    def _moved_out(self, original: cst.CSTNode, updated: Any) -> list[Any]:
        """Returns the rest of a statement that moves into a function: its call, in place of the last statement."""
        taped = self._taped[original]
        self._moved.setdefault(taped, []).append(updated)
        if original is not taped.statements[-1]:
            return []
        call = f"{taped.name}({', '.join(taped.parameters)})"
        line = f"{', '.join(taped.results)} = {call}" if taped.results else "return " * taped.returns + call
        first = self._moved[taped][0]
        self._moved[taped][0] = first.with_changes(leading_lines=[])
        return [cst.parse_statement(line).with_changes(leading_lines=first.leading_lines)]

    def _with_functions(self, taped: list[Taped], statements: list[Any]) -> list[Any]:
        """Returns the statements of the module with the new functions above them."""
        blank = [cst.EmptyLine(indent=False)] * 2
        above = list(itertools.dropwhile(lambda line: line.comment is None, statements[0].leading_lines))
        functions = []
        for each in taped:
            function = cst.parse_statement(
                f"@{self._imports.local['rx']}.function\ndef {each.name}({', '.join(each.parameters)}):\n    pass\n"
            )
            body = self._moved[each]
            if each.results:
                body = [*body, cst.parse_statement(f"return {', '.join(each.results)}")]
            assert isinstance(function, cst.FunctionDef)
            body_of = cst.IndentedBlock(body, indent=self._indent_of(each))
            functions.append(function.with_changes(body=body_of, leading_lines=blank))
        return [*functions, statements[0].with_changes(leading_lines=[*blank, *above]), *statements[1:]]

    def _indent_of(self, taped: Taped) -> str | None:
        """Returns the indent of the body of a tape's ``with``."""
        body = getattr(taped.statements[0], "body", None)
        return body.indent if isinstance(body, cst.IndentedBlock) else None

    def _without_dropped(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        pairs = zip(original.args, updated.args, strict=True)
        stays = [new for old, new in pairs if old not in self._decisions.dropped]
        gone = [old for old in original.args if old in self._decisions.dropped]
        self._lifted += [
            c.value for old in gone for c in m.findall(old, m.Comment()) if isinstance(c, cst.Comment)
        ]
        if stays:  # the text before the closing bracket stays
            last = updated.args[-1]
            stays[-1] = stays[-1].with_changes(
                comma=last.comma, whitespace_after_arg=last.whitespace_after_arg
            )
        return updated.with_changes(args=stays)

    def _localized(self, template: str) -> str:
        """Returns the template with the module's names for its roots."""
        return ROOT.sub(lambda match: self._imports.local[match[1]], template + ".").removesuffix(".")

    def _placed(self, original: cst.CSTNode, new: cst.BaseExpression) -> cst.BaseExpression:
        """Returns the expression with necessary parentheses, and with other quotes than those of an f-string around
        it.
        """
        parent = self._source.parents[original]
        old = original.lpar if isinstance(original, cst.BaseExpression) else ()
        if (isinstance(parent, _TIGHT) and not isinstance(new, _ATOM) and not new.lpar) or (
            old and not new.lpar
        ):
            new = new.with_changes(lpar=[cst.LeftParen()], rpar=[cst.RightParen()])
        around = [node for node in self._source.around(original) if isinstance(node, cst.FormattedString)]
        code = cst.Module([]).code_for_node(new)
        if around and around[0].quote in code:
            other = "'" if around[0].quote == '"' else '"'
            new = cst.parse_expression(code.replace(around[0].quote, other))
        return new

    def _filled(
        self, original: cst.Call | cst.Attribute, updated: cst.Call | cst.Attribute
    ) -> cst.BaseExpression:
        filling = self._decisions.fillings[original]
        template = self._localized(filling.template)
        if isinstance(updated, cst.Attribute):
            return cst.parse_expression(fill(template, {"self": self._code(updated.value)}))
        given = self._by_parameter(filling.row, updated.args)
        given = {name: arguments for name, arguments in given.items() if name in filling.arguments}
        plain = _PLAIN.fullmatch(template)
        if plain and not any(p.kind == "variadic" for p in filling.row.parameters or ()):
            call = self._same_layout(original, updated, plain, {name: given[name][0] for name in given})
            if call is not None:
                return call
        texts: dict[str, Any] = {
            name: tuple(a.star + self._code(a.value) for a in arguments)
            if isinstance(filling.arguments[name], tuple)
            else self._code(arguments[0].value)
            for name, arguments in given.items()
        }
        texts |= {name: () for name in filling.arguments if name not in texts}
        if isinstance(updated.func, cst.Attribute):
            texts["self"] = self._code(updated.func.value)
            if isinstance(updated.func.value, cst.Attribute):
                texts["owner"] = self._code(updated.func.value.value)
        return cst.parse_expression(fill(template, texts, filling.bound))

    def _by_parameter(self, row: Row, arguments: Sequence[cst.Arg]) -> dict[str, list[cst.Arg]]:
        """Returns the arguments of a call that binds, by the parameters of its row."""
        places = [p.name for p in row.parameters or () if p.kind == "positional"]
        rest = next((p.name for p in row.parameters or () if p.kind == "variadic"), "")
        found: dict[str, list[cst.Arg]] = {}
        for place, argument in enumerate(arguments):
            if argument.keyword:
                found[row.parameter(argument.keyword.value)] = [argument]
            elif place < len(places):
                found[places[place]] = [argument]
            else:
                found.setdefault(rest, []).append(argument)
        return found

    def _same_layout(
        self, original: Any, updated: cst.Call, plain: re.Match[str], given: Mapping[str, cst.Arg]
    ) -> cst.Call | None:
        """Returns the call with another function and other keywords in the same lines; None if the order differs."""
        wanted = []
        for part in filter(None, plain[2].split(", ")):
            keyword, _, placeholder = part.rpartition("=")
            if placeholder[1:-1] in given:
                wanted.append((keyword, given[placeholder[1:-1]]))
            elif not keyword:
                return None
        order = [argument for argument in updated.args if any(argument is a for _, a in wanted)]
        positional = [argument for keyword, argument in wanted if not keyword]
        if not all(a is b for a, b in zip(positional, order)):
            return None
        keywords = {id(argument): keyword for keyword, argument in wanted}
        arguments = [self._with_keyword(argument, keywords[id(argument)]) for argument in order]
        if arguments:
            last, own = updated.args[-1], arguments[-1].comma
            comma = own if isinstance(own, cst.Comma) and "#" in self._code(own) else last.comma
            space = last.whitespace_after_arg
            arguments[-1] = arguments[-1].with_changes(comma=comma, whitespace_after_arg=space)
        function = updated.func
        if plain[1] != self._code(function) and not self._is_moved(original.func, plain[1]):
            function = cst.parse_expression(plain[1])
        return updated.with_changes(func=function, args=arguments)

    def _is_moved(self, function: cst.BaseExpression, target: str) -> bool:
        """True for the ``Adam`` of ``from tensorflow.keras.optimizers import Adam`` that becomes ``keras.…Adam``."""
        name = self._source.dotted(function) if isinstance(function, cst.Name) else None
        return name is not None and moved_name(name) == target

    def _with_keyword(self, argument: cst.Arg, keyword: str) -> cst.Arg:
        if keyword == (argument.keyword.value if argument.keyword else ""):
            return argument
        no_space = cst.SimpleWhitespace("")
        return argument.with_changes(
            keyword=cst.Name(keyword) if keyword else None,
            equal=cst.AssignEqual(no_space, no_space) if keyword else cst.MaybeSentinel.DEFAULT,
        )

    def _code(self, node: cst.CSTNode) -> str:
        return self._source.tree.code_for_node(node)


@final
@dataclass(frozen=True)
class Rewritten:
    """A module after the table was applied to it."""

    code: bytes
    changes: tuple[Change, ...]
    marks: tuple[Mark, ...]


def rewrite(
    source: ParsedModule,
    decisions: Decisions,
    used: Set[ImportedName] = frozenset(),
    *,
    needs_backend: bool = False,
) -> Rewritten:
    """Applies decisions.

    Args:
      source: The module.
      decisions: The decisions for this module.
      used: The imports that other modules use.
      needs_backend: True if the module is the start of a program that uses Keras, so that it must set KERAS_BACKEND.
    """
    imports = Imports(
        source,
        decisions.roots(),
        decisions.used | used,
        decisions.freed,
        needs_backend=needs_backend,
        before_random=decisions.first_random(),
    )
    tree = source.tree.visit(Rewriter(source, decisions, imports))
    return Rewritten(tree.bytes, tuple(decisions.changes), decisions.comments.marks())

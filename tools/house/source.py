"""The source of a package: its modules, and the edges between them.

An *edge* is the mention of one module by another. Its kind is ``run`` (an import when the module is loaded), ``lazy``
(in a function), ``type`` (under ``TYPE_CHECKING``) or ``string`` (a string that names a module). An import is hard to
hide: relative imports, joined and formatted strings, ``sys.modules``, ``getattr`` and attributes of packages are edges
too. A name that a module only passes on is an edge to the module that defines it as well.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final, Literal, TypeAlias, final

Kind: TypeAlias = Literal["run", "lazy", "type", "string"]
Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
EVERY_KIND: Final[frozenset[Kind]] = frozenset(("run", "lazy", "type", "string"))
AT_RUN_TIME: Final[frozenset[Kind]] = frozenset(("run", "lazy"))
DATA_FILES: Final = (".toml", ".json", ".yaml", ".yml", ".cfg", ".ini", ".txt")
# Calls that import or run a module whose name is their argument.
IMPORTERS: Final = frozenset(
    [
        "import_module",
        "__import__",
        "find_spec",
        "run_module",
        "run_path",
        "resolve_name",
        "spec_from_file_location",
        "SourceFileLoader",
        "load_module",
        "iter_modules",
        "walk_packages",
        "entry_points",
        "exec",
        "eval",
        "compile",
    ]
)
BUILTINS: Final = frozenset(
    ("exec", "eval", "compile", "__import__")
)  # of these, methods of the same name are others
PACKAGES: Final = frozenset(
    ("keras", "optax", "jax")
)  # "keras.losses" is Keras's, if nothing is imported by name
UNKNOWN: Final = "*"


@final
@dataclass(frozen=True)
class Edge:
    """A mention of a module.

    Attributes:
      target: The module.
      kind: How it is mentioned.
      name: The name that is taken from it, as its own source calls it; "" for the module itself, or all of it.
      line: Where.
    """

    target: str
    kind: Kind
    name: str = ""
    line: int = 0


@final
@dataclass(frozen=True)
class Unsaid:
    """A call that imports a module, or runs code, that the source does not name."""

    module: str
    line: int
    text: str


@final
class House:
    """A package below a source folder.

    Args:
      source: The folder that contains the package.
      package: Its name.
      registry: The module that may name the parts. Its own edges are not counted.
    """

    def __init__(self, source: Path, package: str = "replicax", registry: str = "replicax._src.parts"):
        self.source = source
        self.package = package
        self.registry = registry
        self.files = {self._module_of(path): path for path in sorted(source.glob(f"{package}/**/*.py"))}
        self.texts = {module: path.read_text() for module, path in self.files.items()}
        self.trees = {module: ast.parse(text) for module, text in self.texts.items()}
        self.nodes = {module: list(ast.walk(tree)) for module, tree in self.trees.items()}
        self.public = {module for module in self.files if not re.search(r"\._(?!_)", module)}
        self.private = set(self.files) - self.public
        found = {module: _Reader(self, module).read() for module in self.files}
        self.edges: dict[str, tuple[Edge, ...]] = {
            module: () if module == registry else tuple(reader.edges) for module, reader in found.items()
        }
        self.unsaid = [each for reader in found.values() for each in reader.unsaid]

    def _module_of(self, path: Path) -> str:
        parts = path.relative_to(self.source).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def place_of(self, module: str) -> str:
        """The path of a module's file from the source folder."""
        return self.files[module].relative_to(self.source).as_posix()

    def is_folder(self, module: str) -> bool:
        return self.files[module].name == "__init__.py"

    def room_of(self, module: str) -> str:
        """The first folder below ``_src`` that a file is in, however deep; ``_src`` for those beside the folders.

        A part is one room, and so are the public modules.
        """
        parts = self.files[module].relative_to(self.source).parts
        if len(parts) < 3 or not parts[1].startswith("_"):
            return "public"
        return "/".join(parts[1:3]) if parts[1] == "_src" and len(parts) > 3 else parts[1]

    @functools.cache  # noqa: B019 - one house lives as long as the process
    def code_lines(self, module: str) -> int:
        """Lines of code, without docstrings, comments and blank lines."""
        documented: set[int] = set()
        for node in self.nodes[module]:
            if (
                isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))
                and node.body
            ):
                first = node.body[0]
                if (
                    isinstance(first, ast.Expr)
                    and isinstance(first.value, ast.Constant)
                    and isinstance(first.value.value, str)
                ):
                    documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
        lines = enumerate(map(str.strip, self.texts[module].split("\n")), 1)
        return sum(
            1 for number, line in lines if line and number not in documented and not line.startswith("#")
        )

    def origin(self, module: str, name: str) -> tuple[str, str]:
        """The module that defines a name, and its name there; follows imports and tables of lazy names."""
        seen = set()
        while (module, name) not in seen:
            seen.add((module, name))
            further = self._bindings(module).get(name)
            if further is None:
                break
            module, name = further
        return module, name

    @functools.cache  # noqa: B019
    def _bindings(self, module: str) -> dict[str, tuple[str, str]]:
        """The names that a module takes from others and would pass on: the name -> (module, name)."""
        found: dict[str, tuple[str, str]] = {}
        trees = [self.trees[module]]
        stub = self.files[module].with_suffix(".pyi")
        if stub.exists():
            trees.append(ast.parse(stub.read_text()))
        if module == self.package and self.registry in self.files:
            trees.append(self.trees[self.registry])
        for tree in trees:
            for node in outside_of_functions(tree):
                if isinstance(node, ast.ImportFrom):
                    source = self.absolute(module, node)
                    for alias in node.names:
                        if (
                            f"{source}.{alias.name}" not in self.files
                            and source in self.files
                            and source != module
                        ):
                            found.setdefault(alias.asname or alias.name, (source, alias.name))
                elif isinstance(node, ast.Dict):
                    for key, value in zip(node.keys, node.values, strict=True):
                        if isinstance(key, ast.Constant) and isinstance(key.value, str):
                            place, _, attribute = (fold(value, {}) or "").partition(":")
                            for full in (place, f"{self.package}.{place}", f"{self.package}._src.{place}"):
                                if full in self.files and full != module:
                                    found.setdefault(key.value, (full, attribute or key.value))
        defined = set(defined_names(self.trees[module]))
        return {name: place for name, place in found.items() if name not in defined}

    def absolute(self, module: str, node: ast.ImportFrom) -> str:
        """The module after ``from``, in full."""
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        parts = parts[: len(parts) - node.level + self.is_folder(module)]
        return ".".join([*parts, *([node.module] if node.module else [])])

    def names_in_data(self) -> list[str]:
        """Private modules that data files of the package name: a registry that nobody sees."""
        folders = {parts[1] for module in self.private if len(parts := module.split(".")) > 1}
        pattern = re.compile(rf"\b(?:{self.package}[./])?(?:{'|'.join(sorted(folders))})(?:[./]\w+)+")
        found = []
        for path in sorted((self.source / self.package).rglob("*")):
            if path.suffix in DATA_FILES:
                found += [f"{path.name}: {name}" for name in pattern.findall(path.read_text())]
        return found


def outside_of_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a module that are not in a function."""
    for child in ast.iter_child_nodes(tree):
        if not isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)):
            yield child
            yield from outside_of_functions(child)


def defined_names(tree: ast.Module) -> Iterator[str]:
    """The names that a module defines itself, at its top level."""
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


def fold(node: ast.AST | None, constants: dict[str, str]) -> str | None:
    """The string that an expression makes, with ``*`` for what only running it would tell; None if it is no string."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.Name):
        return constants.get(node.id)
    if isinstance(node, ast.JoinedStr):
        pieces = [
            fold(each.value if isinstance(each, ast.FormattedValue) else each, constants)
            for each in node.values
        ]
        return "".join(UNKNOWN if piece is None else piece for piece in pieces)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = fold(node.left, constants), fold(node.right, constants)
        return None if sides == (None, None) else "".join(UNKNOWN if side is None else side for side in sides)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod):
        text = fold(node.left, constants)
        return None if text is None else re.sub(r"%\w", UNKNOWN, text)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        text = fold(node.func.value, constants)
        if text is not None and node.func.attr == "format":
            return re.sub(r"\{[^}]*\}", UNKNOWN, text)
        if text is not None and node.func.attr == "join" and node.args:
            if isinstance(node.args[0], (ast.List, ast.Tuple)):
                pieces = [fold(each, constants) for each in node.args[0].elts]
                return text.join(UNKNOWN if piece is None else piece for piece in pieces)
            return UNKNOWN
    return None


def is_for_checkers(test: ast.expr) -> bool | None:
    """True for ``if TYPE_CHECKING``, False for ``if not TYPE_CHECKING``, None for another condition."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        inner = is_for_checkers(test.operand)
        return None if inner is None else not inner
    name = getattr(test, "id", None) or getattr(test, "attr", None)
    return True if name == "TYPE_CHECKING" else None


def is_table_of_modules(node: ast.expr) -> bool:
    """True for ``sys.modules``."""
    return (
        isinstance(node, ast.Attribute) and node.attr == "modules" and getattr(node.value, "id", "") == "sys"
    )


@final
class _Reader:
    """Reads the edges of one module."""

    def __init__(self, house: House, module: str):
        self._house = house
        self._module = module
        self._tree = house.trees[module]
        self._pattern = re.compile(rf"^{house.package}(\.\w+)+(:\w+(\.\w+)*)?$")
        self._constants = dict(self._string_constants())
        self._modules: dict[str, str] = {}  # local names of modules -> the modules
        self._chains: list[tuple[str, str, Kind, int]] = []
        self._imports_by_name = False
        self.edges: list[Edge] = []
        self.unsaid: list[Unsaid] = []

    def read(self) -> _Reader:
        nodes = self._house.nodes[self._module]
        self._imports_by_name = any(UNKNOWN in (self._imported_by(node) or "") for node in nodes)
        for node in nodes:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self._bind(node)
        self._visit(self._tree, "run")
        kinds: dict[str, Kind] = {
            edge.target: edge.kind for edge in reversed(self.edges) if edge.kind != "string"
        }
        for module, name, kind, line in self._chains:  # the use of an import is no further import
            self._add(module, name, kind, line, kinds)
        self.edges = [edge for edge in dict.fromkeys(self.edges) if edge.target != self._module]
        return self

    def _string_constants(self) -> Iterator[tuple[str, str]]:
        for node in self._tree.body:
            target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(target, ast.Name):
                text = fold(node.value, {})
                if text is not None:
                    yield target.id, text

    def _bind(self, node: ast.Import | ast.ImportFrom) -> None:
        files, package = self._house.files, self._house.package
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                full = f"{self._house.absolute(self._module, node)}.{alias.name}"
                if full in files:
                    self._modules[alias.asname or alias.name] = full
            elif alias.name.split(".")[0] == package:
                self._modules[alias.asname or package] = alias.name if alias.asname else package

    def _visit(self, node: ast.AST, kind: Kind) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.If) and (for_checkers := is_for_checkers(child.test)) is not None:
                for body, is_type in ((child.body, for_checkers), (child.orelse, not for_checkers)):
                    self._visit(ast.Module(body, []), "type" if is_type else kind)
                continue
            in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            self._read_node(child, kind)
            if isinstance(child, ast.expr) and fold(child, self._constants) is not None:
                continue
            self._visit(child, "lazy" if in_function and kind == "run" else kind)

    def _read_node(self, node: ast.AST, kind: Kind) -> None:
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ImportFrom):
            source = self._house.absolute(self._module, node)
            for alias in node.names:
                self._add(source, alias.name, kind, line)
        elif isinstance(node, ast.Import):
            for alias in node.names:
                self._add(alias.name, "", kind, line)
        elif isinstance(node, ast.Attribute):
            self._read_chain(node, kind)
        elif (called := self._imported_by(node)) is not None:
            self._add_pattern(called, line)
            if UNKNOWN in called and self._is_vague(called):
                self.unsaid.append(Unsaid(self._module, line, ast.unparse(node)[:100]))
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and len(node.args) > 1:
            module, name = self._module_named(node.args[0]), fold(node.args[1], self._constants)
            if module and name is not None:
                self._chains.append((module, name, kind, line))
        elif isinstance(node, ast.expr) and (text := fold(node, self._constants)) is not None:
            self._add_string(text, line)

    def _imported_by(self, node: ast.AST) -> str | None:
        """The module that a call imports, ``*`` if the source does not say which; None for other nodes."""
        if isinstance(node, ast.Call):
            owner = node.func.value if isinstance(node.func, ast.Attribute) else None
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in IMPORTERS and (owner is None or name not in BUILTINS - {"__import__"}):
                argument = node.args[0] if node.args else next((each.value for each in node.keywords), None)
                return self._text(argument)
            if name in ("get", "pop", "__getitem__") and owner is not None and is_table_of_modules(owner):
                return self._text(node.args[0] if node.args else None)
        if isinstance(node, ast.Subscript) and is_table_of_modules(node.value):
            return self._text(node.slice)
        return None

    def _text(self, node: ast.AST | None) -> str:
        text = fold(node, self._constants)
        return UNKNOWN if text is None else text

    def _add_string(self, text: str, line: int) -> None:
        if self._pattern.match(text):
            target = text.partition(":")[0]
            if target in self._house.files:
                self.edges.append(Edge(target, "string", line=line))
            else:  # a name in a module
                module, _, name = target.rpartition(".")
                if module in self._house.files and module != self._house.package:
                    self.edges.append(Edge(module, "string", name, line))
        elif text.startswith(f"{self._house.package}.") and UNKNOWN in text:
            self._add_pattern(text, line)
        elif re.fullmatch(
            r"\w+(\.\w+)+(:\w+)?", text
        ):  # the rest of a name that is put together, here or elsewhere
            text = text.partition(":")[0]
            if text.split(".")[0] in PACKAGES and not self._imports_by_name:
                return
            for full in (f"{self._house.package}.{text}", f"{self._house.package}._src.{text}"):
                if full in self._house.files:
                    self.edges.append(Edge(full, "string", line=line))

    def _add_pattern(self, text: str, line: int) -> None:
        """Adds all modules of the package that a name with unknown pieces could be."""
        if UNKNOWN not in text:
            self._add_string(text, line)
        elif not self._is_vague(text):
            pattern = re.compile(re.escape(text).replace(re.escape(UNKNOWN), r"[\w.]*") + "$")
            self.edges += [
                Edge(module, "string", line=line)
                for module in self._house.files
                if pattern.match(module) and module != self._house.package
            ]

    def _is_vague(self, text: str) -> bool:
        """True if the known beginning of a name says no folder of the package."""
        known = text.partition(UNKNOWN)[0].rpartition(".")[0].split(".")
        return known[0] != self._house.package or not set(known[1:]) - {"_src"}

    def _add(
        self, module: str, name: str, kind: Kind, line: int, kinds: Mapping[str, Kind] = MappingProxyType({})
    ) -> None:
        """Adds the import of a name: the module that it comes from, and the one that defines it.

        ``kinds`` has the kinds of imports that were made already.
        """
        files, package = self._house.files, self._house.package
        if module.split(".")[0] != package:
            return
        if name and f"{module}.{name}" in files:
            full = f"{module}.{name}"
            self.edges.append(Edge(full, kinds.get(full, kind), line=line))
            return
        while module and module not in files:
            module, _, name = module.rpartition(".")
        if not module:
            return
        defined = self._house.origin(module, name) if name and name != "*" else (module, name)
        for target, taken in dict.fromkeys(((module, name), defined)):
            if target != package:
                is_origin = (target, taken) == defined
                self.edges.append(Edge(target, kinds.get(target, kind), taken if is_origin else "", line))

    def _module_named(self, node: ast.AST) -> str | None:
        """The module that an expression is: a local name of a module, or a chain of packages."""
        if isinstance(node, ast.Name):
            return self._modules.get(node.id)
        if isinstance(node, ast.Attribute):
            above = self._module_named(node.value)
            if above is not None and f"{above}.{node.attr}" in self._house.files:
                return f"{above}.{node.attr}"
        imported = self._imported_by(node)
        return imported if imported in self._house.files else None

    def _read_chain(self, node: ast.Attribute, kind: Kind) -> None:
        module = self._module_named(node.value)
        if module is not None:
            self._chains.append((module, node.attr, kind, node.lineno))


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """The strongly connected components of more than one node, the largest first."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for root in sorted(graph):
        if root in index:
            continue
        work: list[tuple[str, Iterator[str]]] = []

        def enter(node: str, work: list[tuple[str, Iterator[str]]] = work) -> None:
            index[node] = low[node] = len(index)
            stack.append(node)
            on_stack.add(node)
            work.append((node, iter(sorted(graph[node]))))

        enter(root)
        while work:
            node, targets = work[-1]
            for target in targets:
                if target not in graph:
                    continue
                if target not in index:
                    enter(target)
                    break
                if target in on_stack:
                    low[node] = min(low[node], index[target])
            else:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    members = stack[stack.index(node) :]
                    del stack[stack.index(node) :]
                    on_stack.difference_update(members)
                    if len(members) > 1:
                        found.append(sorted(members))
    return sorted(found, key=lambda members: (-len(members), members))


def circles_of_files(house: House, kinds: Iterable[Kind]) -> list[list[str]]:
    wanted = set(kinds)
    return circles(
        {
            module: {
                edge.target
                for edge in house.edges[module]
                if edge.kind in wanted and edge.target in house.private
            }
            for module in house.private
        }
    )


def imports_between_rooms(house: House, kinds: Iterable[Kind] = AT_RUN_TIME) -> set[tuple[str, str]]:
    wanted = set(kinds)
    return {
        (house.room_of(module), house.room_of(edge.target))
        for module in house.private
        for edge in house.edges[module]
        if edge.kind in wanted
        and edge.target in house.private
        and house.room_of(module) != house.room_of(edge.target)
    }


def rooms_that_import_each_other(house: House) -> list[tuple[str, str]]:
    pairs = imports_between_rooms(house)
    return sorted({(low, high) for low, high in pairs if low < high and (high, low) in pairs})


def circles_of_rooms(house: House, kinds: Iterable[Kind] = AT_RUN_TIME) -> list[list[str]]:
    graph: dict[str, set[str]] = {house.room_of(module): set() for module in house.private}
    for room, target in imports_between_rooms(house, kinds):
        graph[room].add(target)
    return circles(graph)

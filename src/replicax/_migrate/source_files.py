"""The files of a program: finds, parses and rewrites them together, and records the outcome of each."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import re
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, final

import libcst as cst

from replicax._migrate import syntax_error
from replicax._migrate.comments import Mark
from replicax._migrate.decisions import Change, Decisions, decide
from replicax._migrate.name_bindings import ParsedModule, Program
from replicax._migrate.notebooks import Notebook, NotebookError, WrittenFile
from replicax._migrate.reach import Reach
from replicax._migrate.rewrite import Rewritten, rewrite

SUFFIXES: Final = (".py", ".ipynb")
# A program without any of these words has nothing of TensorFlow.
_CONCERNS: Final = re.compile("tensorflow|keras|replicax", re.IGNORECASE)
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


@final
@dataclass(frozen=True, eq=False)
class _Part:
    """One module of a file: the file itself, the cells of a notebook, or a file that a cell writes."""

    source: ParsedModule
    written: WrittenFile | None = None

    @property
    def offset(self) -> int:
        """The number at which its lines start."""
        return self.written.offset if self.written else 0


@final
@dataclass
class File:
    """One file of the program, and its outcome.

    Attributes:
      path: The path as the user gave it.
      root: The directory, or the file's directory, that the user gave.
      old, new: The contents.
      changes, marks: The changes and marks, for the report.
      reads_statistics: True if it evaluates in replica functions, in a program with moving statistics.
      failure: The reason why the file was left unchanged; empty if it was not.
    """

    path: Path
    root: Path
    old: bytes = b""
    new: bytes = b""
    changes: tuple[Change, ...] = ()
    marks: tuple[Mark, ...] = ()
    reads_statistics: bool = False
    failure: str = ""
    notebook: Notebook | None = field(default=None, repr=False)
    _code: str = field(default="", repr=False)
    _encoding: str = field(default="utf-8", repr=False)
    _texts: list[tuple[int, str, str]] = field(default_factory=list, repr=False)
    _line_after: dict[int, int] | None = field(default=None, repr=False)

    def place(self, line: int) -> str:
        """Returns the place in the new file of a line of the old one, in the form of the report."""
        if self.notebook is None:
            return f"{self.path}:{self._now(line)}"
        return f"{self.path}: {self.notebook.place(self._now(line), self._code)}"

    def _now(self, line: int) -> int:
        """Returns the line in the new text."""
        if self._line_after is None:
            self._line_after = {
                offset + before: offset + after
                for offset, old, new in self._texts
                for before, after in _lines_after(old.splitlines(), new.splitlines())
            }
        return self._line_after.get(line, line)

    def codes(self) -> list[str]:
        """Returns the new texts of its modules."""
        return [new for _, _, new in self._texts]

    def diff(self) -> Iterator[str]:
        """Yields the lines of a unified diff; for a notebook, cell by cell."""
        if self.notebook is not None:
            for number, old, new in self.notebook.changed(self._code):
                yield from _diff(f"{self.path} (cell {number})", old, new)
        elif self.new != self.old:
            yield from _diff(str(self.path), self.old.decode(self._encoding), self.new.decode(self._encoding))


def find_files(paths: Sequence[Path]) -> list[File]:
    """Returns the programs and notebooks below the paths, each once. Links to directories are not followed.

    Raises:
      FileNotFoundError: There is no such path.
      ValueError: A path is not a program, or a directory has none.
    """
    found: dict[Path, File] = {}
    for path in paths:
        if path.is_dir():
            below = [
                Path(folder) / name
                for folder, folders, names in os.walk(path)
                for _ in [_leave_out(folders)]
                for name in sorted(names)
                if name.endswith(SUFFIXES)
            ]
            if not below:
                raise ValueError(f"{path} has no Python files and no notebooks")
            for file in below:
                found.setdefault(file.resolve(), File(file, path))
        elif not path.exists():
            raise FileNotFoundError(f"{path} does not exist")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"{path} is neither a Python file nor a notebook")
        else:
            found.setdefault(path.resolve(), File(path, path.parent))
    return list(found.values())


def _leave_out(folders: list[str]) -> None:
    folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))


def migrate(files: Sequence[File]) -> None:
    """Computes the new contents of the files. Nothing is written."""
    parsed = [(file, part) for file in files for part in _parse(file)]
    if not any(_CONCERNS.search(part.source.code) for _, part in parsed):
        return  # `tensor.numpy()` and `pool.run` are those of another library
    program = Program([part.source for _, part in parsed])
    reach = Reach(program)
    imported = {below for source in program.sources for below in program.imported_by(source)}
    decided: dict[ParsedModule, Decisions] = {}
    has_statistics = any(name.endswith(".BatchNormalization") for name in reach.names)
    for file, part in parsed:
        with _told_of(file):
            decided[part.source] = decide(part.source, reach)
            file.reads_statistics |= has_statistics and reach.evaluates_replicas(part.source)
    used = {bound for decisions in decided.values() for bound in decisions.used}
    for file, part in parsed:
        source = part.source
        if source not in decided:
            continue
        is_entry = source not in imported and file.path.name != "__init__.py"
        below = [decided[module] for module in program.all_below(source) if module in decided]
        uses_replicax = any("rx" in decisions.roots() for decisions in below)
        imports_keras = any(
            decisions.uses_keras or ((decisions.used or "tf" in decisions.roots()) and uses_replicax)
            for decisions in below
        )  # tensorflow does
        with _told_of(file):
            result = rewrite(source, decided[source], used, needs_backend=is_entry and imports_keras)
            _take(file, part, result)
    for file in files:
        if file.notebook is not None:
            file.new = file.notebook.text(file._code).encode()


def _take(file: File, part: _Part, result: Rewritten) -> None:
    """Stores the new contents of one module of a file."""
    new = result.code.decode(part.source.tree.encoding)
    if part.written is not None:
        assert file.notebook is not None
        ast.parse(new)
        file.notebook.write(part.written, new)
    elif file.notebook is not None:
        file._code = new
    else:
        ast.parse(result.code)
        file.new, file._encoding = result.code, part.source.tree.encoding
    file._texts.append((part.offset, part.source.code, new))
    file.changes += tuple(replace(change, line=change.line + part.offset) for change in result.changes)
    file.marks += tuple(replace(mark, line=mark.line + part.offset) for mark in result.marks)


@contextlib.contextmanager
def _told_of(file: File) -> Iterator[None]:
    """Records a failure for this file, so that the others continue."""
    try:
        yield
    except Exception as error:
        file.failure = f"left alone: it could not be rewritten: {type(error).__name__}: {error}"


def _parse(file: File) -> list[_Part]:
    try:
        file.old = file.new = file.path.read_bytes()
        code: bytes | str = file.old
        if file.path.suffix == ".ipynb":
            file.notebook = Notebook(file.old.decode("utf-8"))
            file._code = code = file.notebook.code
            if file.notebook.unparsed:
                file.failure = (
                    f"{', '.join(file.notebook.unparsed)} is no Python module on its own, and is left alone"
                )
        parts = [_Part(ParsedModule(file.path, code, _module_name(file)))]
        for written in file.notebook.written if file.notebook else ():
            path = file.path.with_name(f"{written.name}.py")
            code = written.code
            parts.append(_Part(ParsedModule(path, code, written.name), written))
        return parts
    except cst.ParserSyntaxError as error:
        found = syntax_error.words_of(code, file.path.name)
        file.failure = (
            f"left alone: it cannot be parsed: {found or f'line {error.raw_line}: {error.message}'}"
        )
    except (OSError, NotebookError) as error:
        file.failure = f"left alone: {error}"
    except (UnicodeError, SyntaxError) as error:
        file.failure = f"left alone: it is not text: {error}"
    return []


def _module_name(file: File) -> str:
    """Returns the dotted name of a file below the given directory, with the packages above it."""
    path = file.path.resolve().with_suffix("")
    root = file.root.resolve()
    parts = list(path.relative_to(root).parts) if path.is_relative_to(root) else [path.name]
    folder = root
    while (folder / "__init__.py").exists() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _lines_after(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yields each line number of the old text with its number in the new one."""
    for _, start, end, begin, stop in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        for line in range(start, end):
            yield line + 1, min(begin + line - start, max(begin, stop - 1)) + 1


def _diff(name: str, old: str, new: str) -> Iterator[str]:
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        f"a/{name.lstrip('/')}",
        f"b/{name.lstrip('/')}",
    )
    for line in lines:
        yield line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"


def write(targets: Iterable[tuple[Path, bytes]]) -> None:
    """Writes files one after another, each atomically. A link stays a link, and its target changes."""
    for path, content in targets:
        path = path.resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(content)
            os.chmod(temporary, path.stat().st_mode if path.exists() else 0o644)
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise

"""The files of a program: found, parsed together, rewritten, and what became of each."""

from __future__ import annotations

import ast
import contextlib
import difflib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, final

import libcst as cst

from replicax._src.migrate.bindings import Program, Source
from replicax._src.migrate.comments import Mark
from replicax._src.migrate.decisions import Change, Decisions, decide
from replicax._src.migrate.notebooks import Notebook, NotebookError
from replicax._src.migrate.reach import Reach
from replicax._src.migrate.rewrite import rewrite

SUFFIXES: Final = (".py", ".ipynb")
_SKIPPED: Final = frozenset({"__pycache__", "node_modules", "site-packages", "venv"})


@final
@dataclass
class File:
    """One file of the program, and what became of it.

    Attributes:
      path: As the user names it.
      root: The directory, or the file's directory, that the user gave.
      old, new: The contents.
      changes, marks: For the report.
      failure: Why the file was left alone; empty if it was not.
    """

    path: Path
    root: Path
    old: bytes = b""
    new: bytes = b""
    changes: tuple[Change, ...] = ()
    marks: tuple[Mark, ...] = ()
    failure: str = ""
    notebook: Notebook | None = field(default=None, repr=False)
    _code: str = field(default="", repr=False)
    _encoding: str = field(default="utf-8", repr=False)

    def place(self, line: int) -> str:
        """Returns where a line is, as the report names it."""
        return f"{self.path}: {self.notebook.place(line)}" if self.notebook else f"{self.path}:{line}"

    def diff(self) -> Iterator[str]:
        """Yields the lines of a unified diff; of a notebook, cell by cell."""
        if self.notebook is not None:
            for number, old, new in self.notebook.changed(self._code):
                yield from _diff(f"{self.path} (cell {number})", old, new)
        elif self.new != self.old:
            yield from _diff(str(self.path), self.old.decode(self._encoding), self.new.decode(self._encoding))


def find_files(paths: Sequence[Path]) -> list[File]:
    """Returns the programs and notebooks below the paths, each once; links to directories are not followed.

    Raises:
      FileNotFoundError: There is no such path.
      ValueError: A path is no program, or a directory has none.
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
            raise FileNotFoundError(f"there is no {path}")
        elif path.suffix not in SUFFIXES:
            raise ValueError(f"{path} is neither a Python file nor a notebook")
        else:
            found.setdefault(path.resolve(), File(path, path.parent))
    return list(found.values())


def _leave_out(folders: list[str]) -> None:
    folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))


def migrate(files: Sequence[File]) -> None:
    """Fills in what becomes of the files. Nothing is written."""
    parsed: list[tuple[File, Source]] = []
    for file in files:
        source = _parse(file)
        if source is not None:
            parsed.append((file, source))
    program = Program([source for _, source in parsed])
    reach = Reach(program)
    imported = {below for source in program.sources for below in program.imported_by(source)}
    decided: dict[Source, Decisions] = {}
    for file, source in parsed:
        with _told_of(file):
            decided[source] = decide(source, reach)
    used = {bound for decisions in decided.values() for bound in decisions.used}
    for file, source in parsed:
        if source not in decided:
            continue
        is_entry = source not in imported and file.path.name != "__init__.py"
        below = [decided[module] for module in program.all_below(source) if module in decided]
        uses_replicax = any("rx" in decisions.roots() for decisions in below)
        imports_keras = any(
            decisions.uses_keras or (decisions.used and uses_replicax) for decisions in below
        )  # tensorflow does
        with _told_of(file):
            result = rewrite(source, decided[source], used, needs_backend=is_entry and imports_keras)
            new = result.code
            if file.notebook is not None:
                file._code = new.decode()
                new = file.notebook.text(file._code).encode()
            else:
                ast.parse(new)
            file.new, file.changes, file.marks = new, result.changes, result.marks
            file._encoding = source.tree.encoding


@contextlib.contextmanager
def _told_of(file: File) -> Iterator[None]:
    """A failure is this file's: the others are done."""
    try:
        yield
    except Exception as error:
        file.failure = f"left alone: it could not be rewritten: {type(error).__name__}: {error}"


def _parse(file: File) -> Source | None:
    try:
        file.old = file.new = file.path.read_bytes()
        code: bytes | str = file.old
        if file.path.suffix == ".ipynb":
            file.notebook = Notebook(file.old.decode("utf-8"))
            file._code = code = file.notebook.code
            if file.notebook.unparsed:
                file.failure = f"{', '.join(file.notebook.unparsed)} cannot be parsed and stays as it is"
        return Source(file.path, code, _module_name(file))
    except cst.ParserSyntaxError as error:
        file.failure = f"left alone: it cannot be parsed: line {error.raw_line}: {error.message}"
    except (OSError, NotebookError) as error:
        file.failure = f"left alone: {error}"
    except (UnicodeError, SyntaxError) as error:
        file.failure = f"left alone: it is not text: {error}"
    return None


def _module_name(file: File) -> str:
    """The dotted name of a file below the directory that was given, and above it as far as that is in a package."""
    path = file.path.resolve().with_suffix("")
    root = file.root.resolve()
    parts = list(path.relative_to(root).parts) if path.is_relative_to(root) else [path.name]
    folder = root
    while (folder / "__init__.py").exists() and folder.name:
        parts.insert(0, folder.name)
        folder = folder.parent
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


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
    """Writes files one after the other, each as a whole; a link stays one, and what it leads to changes."""
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

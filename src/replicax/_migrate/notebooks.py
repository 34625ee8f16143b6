"""Notebooks as modules: joins cells and masks lines for IPython, so that names keep their meaning across cells.

A cell that writes a Python file, ``%%writefile train.py``, is a module of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, final

import libcst as cst

_MOST_DEPTH: Final = 200
_CELL: Final = "__replicax_cell__"
_BEHIND_CELLS: Final = 1_000_000  # lines; more than the cells of a notebook have
_MASK: Final = "__replicax_mask_{}__"
_MASKED: Final = re.compile(r"^[ \t]*__replicax_mask_(\d+)__[ \t]*$", re.M)
_MASKED_BEFORE: Final = re.compile(r"^([ \t]*)__replicax_mask_(\d+)__; ", re.M)
_FOR_IPYTHON: Final = re.compile(r"[ \t]*([!%?]|[\w, \t]+=[ \t]*[!%]|[\w.]+\?{1,2}[ \t]*$)")
# Line magics whose rest is Python.
_BEFORE_PYTHON: Final = re.compile(
    r"([ \t]*)(%(?:time|timeit|prun|memit)(?:[ \t]+-\w+(?:[ \t]+\d+)?)*[ \t]+)(?=\S)"
)
_WRITES: Final = re.compile(r"%%(?:writefile|file)[ \t]+(-a[ \t]+|--append[ \t]+)?(?:\./)?([\w./-]+)\.py\s*$")
# Cell magics of Python cells.
_PYTHON_CELLS: Final = ("%%time", "%%timeit", "%%capture", "%%prun")


class NotebookError(ValueError):
    """The file is not a notebook of format 4 in Python."""


def _read(text: str) -> Any:
    """Returns the value of a JSON text.

    Raises:
      ValueError: It is not JSON, or nested more deeply than ``json.dumps`` could write it.
    """
    document = json.loads(text)
    level = [document]
    for _ in range(_MOST_DEPTH):
        level = [
            child
            for value in level
            if isinstance(value, dict | list)
            for child in (value.values() if isinstance(value, dict) else value)
        ]
    if level:
        raise ValueError(f"it is nested more deeply than {_MOST_DEPTH} lists and objects")
    return document


@final
@dataclass(frozen=True)
class WrittenFile:
    """A Python file that a cell writes.

    Attributes:
      name: The dotted name of its module.
      code: Its text.
      offset: The number at which its lines start, after those of the cells.
      number: The number of the cell.
      mask: The number of the mask that replaces the cell.
    """

    name: str
    code: str
    offset: int
    number: int
    mask: int


@final
class Notebook:
    """A notebook and its code as modules.

    Attributes:
      code: All code cells, one after another.
      written: The files that cells write.
      unparsed: The places of cells that are not Python, or not a whole module. They are left unchanged.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        try:
            document = _read(text)
            self._cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
            sources = [_source(cell) for cell in self._cells]
            language = document.get("metadata", {}).get("kernelspec", {}).get("language", "python")
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise NotebookError("it is not a notebook of format 4") from error
        if language != "python":
            raise NotebookError(f"its language is {language}")
        self.unparsed: list[str] = []
        self.written: list[WrittenFile] = []
        self._masked: list[str] = []
        masked = [self._mask(source, number) for number, source in enumerate(sources, 1)]
        self.code = f"\n{_CELL}\n".join(masked) + "\n"
        self._leave_earlier_versions("\n".join(sources))

    def place(self, line: int, code: str) -> str:
        """Returns the place in the notebook of a line of the current ``code``."""
        for written in reversed(self.written):
            if line > written.offset:
                return f"cell {written.number}, line {line - written.offset + 1}"
        lines = code.splitlines()[: line - 1]
        starts = [number for number, text in enumerate(lines, 1) if text == _CELL]
        return f"cell {len(starts) + 1}, line {line - (starts[-1] if starts else 0)}"

    def write(self, written: WrittenFile, code: str) -> None:
        """Replaces the file that a cell writes."""
        header = self._masked[written.mask].partition("\n")[0]
        self._masked[written.mask] = f"{header}\n{code}"

    def changed(self, code: str) -> Iterator[tuple[int, str, str]]:
        """Yields the number, old and new source of the cells that differ in ``code``."""
        for number, (cell, new) in enumerate(zip(self._cells, self._split(code), strict=True), 1):
            if new != _source(cell):
                yield number, _source(cell), new

    def text(self, code: str) -> str:
        """Returns the file with the cells of ``code``. Everything else stays, including outputs."""
        document = _read(self._text)
        cells = [cell for cell in document["cells"] if cell["cell_type"] == "code"]
        for cell, new in zip(cells, self._split(code), strict=True):
            if new != _source(cell):
                cell["source"] = new.splitlines(keepends=True) if isinstance(cell["source"], list) else new
        indent = re.match(r"\{\r?\n( +|\t+)", self._text)
        text = json.dumps(
            document,
            indent=indent[1] if indent else None,
            ensure_ascii=self._text.isascii() and "\\u" in self._text,
        )
        return text + self._text[len(self._text.rstrip()) :]

    def _split(self, code: str) -> list[str]:
        if not self._cells:
            return []
        cells = re.split(rf"(?:\A|\n){_CELL}\n", code.removesuffix("\n"))
        whole = [_MASKED.sub(lambda match: self._masked[int(match[1])], cell) for cell in cells]
        return [
            _MASKED_BEFORE.sub(lambda match: match[1] + self._masked[int(match[2])], cell) for cell in whole
        ]

    def _mask(self, source: str, number: int) -> str:
        """Returns the cell with a name in place of each line for IPython, or in place of the whole cell."""
        if _parses(source):
            return source
        lines = source.split("\n")
        first = next((line for line in lines if line.strip()), "")
        if writes := _WRITES.match(first):
            self._add_written(source, writes[2].replace("/", "."), number, appends=bool(writes[1]))
        if first.startswith("%%") and not first.startswith(_PYTHON_CELLS):
            return self._masked_as(source, "")
        result: list[str] = []
        while lines:
            line = lines.pop(0)
            before = _BEFORE_PYTHON.match(line)
            if before and _parses(f"pass; {line[before.end() :]}\n"):
                line = f"{self._masked_as(before[2], before[1])}; {line[before.end() :]}"
            elif _FOR_IPYTHON.match(line):
                indent = line[: len(line) - len(line.lstrip())]
                while line.endswith("\\") and lines:
                    line += "\n" + lines.pop(0)
                line = self._masked_as(line, indent)
            result.append(line)
        masked = "\n".join(result)
        if _parses(masked):
            return masked
        self.unparsed.append(f"cell {number}")
        return self._masked_as(source, "")

    def _add_written(self, source: str, name: str, number: int, *, appends: bool) -> None:
        """Adds the file that a cell writes, if it is Python. The first line is a magic."""
        code = source.partition("\n")[2]
        if appends or not source.startswith("%%") or not _parses(code):
            self.unparsed.append(f"cell {number}")
            return
        last = self.written[-1] if self.written else None
        offset = last.offset + last.code.count("\n") + 1 if last else _BEHIND_CELLS
        self.written.append(WrittenFile(name, code, offset, number, len(self._masked)))

    def _leave_earlier_versions(self, text: str) -> None:
        """Drops earlier versions of an imported module that cells write several times, because only the last can be
        followed.
        """
        for place, written in reversed(list(enumerate(self.written))):
            is_written_again = any(later.name == written.name for later in self.written[place + 1 :])
            if is_written_again and re.search(rf"\b(import|from)\s+{re.escape(written.name)}\b", text):
                del self.written[place]
                self.unparsed.append(f"cell {written.number}")

    def _masked_as(self, text: str, indent: str) -> str:
        self._masked.append(text)
        name = indent + _MASK.format(len(self._masked) - 1)
        return name


def _source(cell: dict[str, Any]) -> str:
    source = cell["source"]
    return source if isinstance(source, str) else "".join(source)


def _parses(source: str) -> bool:
    try:
        cst.parse_module(source)
    except cst.ParserSyntaxError:
        return False
    return True

"""The parts of pages that have one form in the checkout and another on the site. Pure.

- A *block* is filled by ``make pages``, so that the page reads well without the site: a comment that says what it has
  (``make pages: kind argument``, and perhaps lines below), its content, and a comment ``end``. Nobody sees comments.
- A *cell* of a tutorial is a ``python`` or ``bash`` listing. A comment ``cell`` before it has its settings on the site.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

_BLOCK = re.compile(
    r"^<!-- make pages: (?P<kind>\w+)(?: (?P<argument>[^\n]+?))?(?:\n(?P<lines>.*?))? ?-->\n(?P<content>.*?)^<!-- end -->$",
    re.MULTILINE | re.DOTALL,
)
_CELL = re.compile(
    r"(?:^<!-- cell\n(?P<settings>.*?)-->\n+)?^```(?P<language>python|bash)\n(?P<code>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
# MyST-NB runs the cells of a page that begins like this.
_HEADER = "---\nfile_format: mystnb\nkernelspec:\n  display_name: Python 3\n  language: python\n  name: python3\n---\n\n"


@final
@dataclass(frozen=True)
class Block:
    """What a comment asks for: the kind of block, its argument, and the lines below."""

    kind: str
    argument: str
    lines: tuple[str, ...]


def fill(text: str, content: Callable[[Block], str]) -> str:
    """Returns a page whose blocks have the content that a function makes.

    >>> print(fill("<!-- make pages: sum 1 2 -->\\n<!-- end -->", lambda block: block.argument.replace(" ", "+")))
    <!-- make pages: sum 1 2 -->
    <BLANKLINE>
    1+2
    <BLANKLINE>
    <!-- end -->
    """

    def filled(match: re.Match[str]) -> str:
        opening = match[0][: match.start("content") - match.start()]
        made = content(_block(match)).strip("\n")
        return f"{opening}\n{made}\n\n<!-- end -->" if made else f"{opening}<!-- end -->"

    return _BLOCK.sub(filled, text)


def as_directives(text: str, names: dict[str, str]) -> str:
    """Returns a page for the site, in which blocks of some kinds are directives.

    Args:
      text: The page.
      names: The name of the directive, by the kind of block.
    """

    def directive(match: re.Match[str]) -> str:
        block = _block(match)
        if block.kind not in names:
            return match[0]
        opening = f"```{{{names[block.kind]}}} {block.argument}".rstrip()
        return "\n".join((opening, *block.lines, "```"))

    return _BLOCK.sub(directive, text)


def with_code_cells(text: str) -> str:
    """Returns a tutorial for the site: each listing is a cell that runs, with its settings."""

    def cell(match: re.Match[str]) -> str:
        settings = f"---\n{match['settings']}---\n" if match["settings"] else ""
        return f"```{{code-cell}} ipython3\n{settings}{_source(match)}```"

    return _HEADER + _CELL.sub(cell, text)


def notebook(text: str) -> dict[str, Any]:
    """Returns a tutorial as a notebook, without outputs."""
    cells: list[dict[str, Any]] = []
    end = 0
    for match in _CELL.finditer(text):
        cells += [*_markdown(text[end : match.start()]), _code(_source(match))]
        end = match.end()
    cells += _markdown(text[end:])
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {
        "cells": [{"id": f"cell-{number}", **cell} for number, cell in enumerate(cells)],
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }


def _block(match: re.Match[str]) -> Block:
    return Block(match["kind"], match["argument"] or "", tuple((match["lines"] or "").splitlines()))


def _source(match: re.Match[str]) -> str:
    return ("%%bash\n" if match["language"] == "bash" else "") + match["code"]


def _markdown(text: str) -> list[dict[str, Any]]:
    text = text.strip("\n")
    return (
        [{"cell_type": "markdown", "metadata": {}, "source": text.splitlines(keepends=True)}] if text else []
    )


def _code(source: str) -> dict[str, Any]:
    lines = source.rstrip("\n").splitlines(keepends=True)
    return {"cell_type": "code", "execution_count": None, "metadata": {}, "outputs": [], "source": lines}

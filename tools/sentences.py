"""Draws sentences of the sources and the pages at random; a reader marks those that must be read twice.

``python tools/sentences.py --seed 7`` prints sixty, each with its place. At most three may be marked; a new
seed gives a new draw.
"""

from __future__ import annotations

import argparse
import ast
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
NOT_PROSE: Final = re.compile(r"^\s*(>>>|\.\.\.|[|#]|\w+:$)|```")
PARAGRAPH: Final = re.compile(r"\n\s*\n|^\s*(?:[-*]|\d+\.) ", re.MULTILINE)  # an item of a list is one, too
SHORTEST: Final = 4  # words


def sentences() -> list[tuple[str, str]]:
    """All sentences, with the files that they are in."""
    found = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        found += [
            (str(path.relative_to(ROOT)), each) for text in texts_of(path) for each in sentences_of(text)
        ]
    for path in sorted((ROOT / "docs").rglob("*.md")):
        prose = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
        found += [(str(path.relative_to(ROOT)), each) for each in sentences_of(prose)]
    return found


def texts_of(path: Path) -> Iterator[str]:
    """Docstrings, messages of errors, and comments of a file."""
    source = path.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield ast.get_docstring(node) or ""
        elif isinstance(node, (ast.Raise, ast.Call)):
            strings = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
            yield from (each for each in strings if isinstance(each, str) and isinstance(node, ast.Raise))
    yield from re.findall(r"^\s*# (.+)$", source, flags=re.MULTILINE)


def sentences_of(text: str) -> Iterator[str]:
    for paragraph in PARAGRAPH.split(text):
        lines = [line.strip() for line in paragraph.splitlines() if not NOT_PROSE.search(line)]
        for sentence in re.split(r"(?<=[.!?])\s+(?=[A-Z`])", " ".join(lines)):
            if len(sentence.split()) >= SHORTEST and sentence.endswith((".", "!", "?")):
                yield sentence


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--count", type=int, default=60)
    arguments = parser.parse_args()
    drawn = random.Random(arguments.seed).sample(sentences(), arguments.count)
    for number, (place, sentence) in enumerate(drawn, 1):
        print(f"{number:3} {place}\n    {sentence}")


if __name__ == "__main__":
    main()

"""Fills the blocks of the pages and writes the tutorials as notebooks: ``make pages``. A test checks that all are current.

What a block has comes from the code: tables of names, texts of commands, first lines of docstrings, parts of README.md.
Where replicax is published (``src/replicax/_src/packaging/home.py``) decides what pages install.
"""

import functools
import importlib
import inspect
import json
import os
import re
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
SOURCE = ROOT / "src" / "replicax"
sys.path.insert(0, str(DOCS / "extensions"))
os.environ["KERAS_BACKEND"] = "jax"  # before Keras is imported

import blocks  # noqa: E402
import command_texts  # noqa: E402
import migration_tables  # noqa: E402

from replicax._src.packaging import home  # noqa: E402

EXAMPLES = tuple(sorted((ROOT / "examples").rglob("*.py")))
PAGES = (ROOT / "README.md", *sorted(DOCS.rglob("*.md")), *sorted((ROOT / "examples").rglob("*.md")))
TUTORIALS = tuple(path for path in PAGES if path.parent == DOCS / "tutorials" and path.stem != "index")
_RELATIVE = re.compile(r"(?<=\]\()(?![a-z]+:|#|/)([^)\s#]+)")
_OF_REPLICAX = re.compile(r"""(?<=pip install )(["'])(?:\.|replicax)\[([\w,-]+)\]\1""")
named_files = runpy.run_path(str(ROOT / "hatch_build.py"))["with_named_files"]


def rebased(text: str, source: Path, target: Path) -> str:
    """Markdown of a file in one folder, for another folder: its relative links lead to the same files."""
    return _RELATIVE.sub(lambda link: os.path.relpath(source / link[1], target), text)


def title_of(page: Path) -> str:
    return re.search(r"^# (.+)$", page.read_text(), re.MULTILINE)[1]


def contents(block: blocks.Block, folder: Path) -> str:
    """A list of links to the pages of a table of contents; nothing if it is hidden. Options are those of a toctree."""
    options = [line for line in block.lines if line.startswith(":")]
    if ":hidden:" in options:
        return ""
    listed: list[Path] = []
    for name in (line for line in block.lines if line and line not in options):
        paths = sorted(folder.glob(f"{name}.md")) if "*" in name else [folder / f"{name}.md"]
        listed += [path for path in paths if path not in listed and path != folder / "index.md"]
    lines = [f"- [{title_of(path)}]({os.path.relpath(path, folder)})" for path in listed]
    captions = [
        f"**{option.removeprefix(':caption: ')}**\n" for option in options if option.startswith(":caption:")
    ]
    return "\n".join((*captions, *lines))


@functools.cache
def definitions() -> dict[str, list[Path]]:
    """The files that define each name of a class or function at their top level."""
    found: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        for name in re.findall(r"^(?:class|def) (\w+)", path.read_text(), re.MULTILINE):
            found.setdefault(name, []).append(path)
    return found


def source_of(value: Any, name: str) -> Path | None:
    """The file that defines a public name; None if several may."""
    if inspect.isfunction(value):
        return Path(inspect.unwrap(value).__code__.co_filename)
    files = definitions().get(getattr(value, "__name__", name), [])
    return files[0] if len(files) == 1 else None


def api(block: blocks.Block, folder: Path) -> str:
    """A table of public names, with the first line of each docstring."""
    module = importlib.import_module(block.argument)
    rows = []
    for name in filter(None, block.lines):
        value = getattr(module, name)
        path = source_of(value, name)
        shown = f"`{name}`" if path is None else f"[`{name}`]({os.path.relpath(path, folder)})"
        about = summary(value) if inspect.isclass(value) or inspect.isroutine(value) else f"`{value!r}`"
        rows.append(f"| {shown} | {about} |")
    return "\n".join(("| name | |", "|---|---|", *rows))


def summary(value: Any) -> str:
    text = " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())
    return text.replace("``", "`").replace("|", r"\|")


def part_of_readme(mark: str, folder: Path) -> str:
    text = (ROOT / "README.md").read_text()
    return rebased(text.split(f"<!-- {mark} -->\n")[1].split(f"<!-- /{mark} -->")[0], ROOT, folder)


def content(block: blocks.Block, folder: Path) -> str:
    match block.kind:
        case "api":
            return api(block, folder)
        case "command":
            return f"```text\n{command_texts.help_of(block.argument)}```"
        case "contents":
            return contents(block, folder)
        case "migration":
            return migration_tables.section(block.argument)
        case "readme":
            return part_of_readme(block.argument, folder)
    raise ValueError(f"make pages fills no block of the kind {block.kind!r}")


def with_installs(text: str) -> str:
    """A page whose commands install replicax from where it is now published."""

    def install(match: re.Match[str]) -> str:
        return f"{match[1]}{home.with_extras(*match[2].split(','))}{match[1]}"

    return _OF_REPLICAX.sub(install, text)


def notebook(page: Path, text: str) -> str:
    """A tutorial as a notebook, which names files instead of linking to them: it is copied to another folder."""
    text = named_files(rebased(text, page.parent, ROOT))
    return json.dumps(blocks.notebook(text), indent=1, ensure_ascii=False) + "\n"


def generated() -> Iterator[tuple[Path, str]]:
    """Each file that this script writes, and its text."""
    for page in PAGES:
        text = blocks.fill(with_installs(page.read_text()), functools.partial(content, folder=page.parent))
        yield page, text
        if page in TUTORIALS:
            yield page.with_suffix(".ipynb"), notebook(page, text)
    for example in EXAMPLES:
        yield example, with_installs(example.read_text())


def main() -> None:
    for path, text in generated():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()

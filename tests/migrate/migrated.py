"""Runs the passes of `replicax migrate` on source texts, without files."""

import textwrap
from pathlib import Path

from replicax._migrate.decisions import decide
from replicax._migrate.name_bindings import ParsedModule, Program
from replicax._migrate.reach import Reach
from replicax._migrate.rewrite import Rewritten, rewrite


def sources(**texts: str) -> Program:
    """Returns a program whose modules have the names of the keywords."""
    modules = [
        ParsedModule(Path(f"{name.replace('__', '/')}.py"), textwrap.dedent(text), name.replace("__", "."))
        for name, text in texts.items()
    ]
    return Program(modules)


def rewritten(text: str) -> Rewritten:
    """Returns the rewritten form of a single module, and checks that a second run changes nothing."""
    done = _rewritten(text)
    again = _rewritten(done.code.decode())
    assert again.code == done.code, "the second run changes something"
    assert [mark.text for mark in again.marks if mark.is_new] == [], "the second run marks something"
    assert sorted(mark.text for mark in again.marks) == sorted(mark.text for mark in done.marks)
    return done


def _rewritten(text: str) -> Rewritten:
    program = sources(program=text)
    (source,) = program.sources
    return rewrite(source, decide(source, Reach(program)))


def becomes(text: str) -> str:
    """Returns the new code of a single module."""
    return rewritten(text).code.decode()


def marks(text: str) -> list[tuple[str, int]]:
    """Returns rule and line of the marks of a single module."""
    return [(mark.rule, mark.line) for mark in rewritten(text).marks]

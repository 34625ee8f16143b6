"""The rules of groups that train alone import nothing but each other: no JAX, arrays, threads, clocks or sockets."""

import ast
from pathlib import Path

import pytest

from replicax._ps.local_updates import member_rules

RULES = (
    "exchange_actions",
    "fragment_rules",
    "heard_members",
    "member_rules",
    "round_state",
    "unmerged_progress",
)
ALLOWED = {"__future__", "collections.abc", "dataclasses", "typing"}


@pytest.mark.parametrize("name", RULES)
def test_rules_import_only_rules(name):
    tree = ast.parse(Path(member_rules.__file__).with_name(f"{name}.py").read_text())
    assert not [node for node in ast.walk(tree) if isinstance(node, ast.Import)]
    modules = {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert modules <= ALLOWED | {f"replicax._ps.local_updates.{each}" for each in RULES}

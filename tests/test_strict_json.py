"""Text of other programs is read by one strict reader, which raises one error."""

import ast
import contextlib
import json
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest

from replicax._src.untrusted import strict_json
from replicax._src.untrusted.strict_json import JsonReader, TextError, read_json

SOURCE = Path(__file__).parents[1] / "src" / "replicax"

# These read text that this program, or a process that it has started or that has started it, has just written.
OF_OUR_OWN = {
    "_src/untrusted/strict_json.py": "the strict reader",
    "_launch/doctor_test.py": "the output of a process that it has started",
    "_launch/plan.py": "the file of a process that it has started",
    "_launch/planned_script.py": "the command line that its parent has made",
    "_src/cluster/controller_process.py": "the line that its parent has written",
    "_src/cluster/start.py": "the answer of a process that it has started",
    "_src/cluster/peers.py": "what it has just written, so that its own value is as one that has travelled",
    "_src/keras/sharded_state.py": "what it has just written",
    "_migrate/notebooks.py": "a notebook: it checks what it needs, and says what is wrong (tests/migrate/test_notebooks.py)",
    "_migrate/keras_dropped.py": "a table of the package",
    "_migrate/table.py": "a table of the package",
    "_ps/strategy/worker_function.py": "a signature that it has made",
    "_testing/task_reports.py": "the reports of a test's own processes",
}
PARSERS = {("json", "loads"), ("json", "load"), ("json", "JSONDecoder")}


def test_only_the_strict_reader_parses_text_of_others():
    users = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            is_attribute = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
            if is_attribute and (node.value.id, node.attr) in PARSERS:
                users.add(file.relative_to(SOURCE).as_posix())
            if (
                isinstance(node, ast.ImportFrom)
                and {(node.module, name.name) for name in node.names} & PARSERS
            ):
                users.add(file.relative_to(SOURCE).as_posix())
    assert users <= OF_OUR_OWN.keys(), "use strict_json.read_json, and check what it returns"
    assert OF_OUR_OWN.keys() <= users, "take these off the list"


def nested(depth):
    return "[" * depth + "]" * depth


def test_depth_is_bounded():
    limit = strict_json.MOST_DEPTH
    assert read_json(nested(limit)) == json.loads(nested(limit))
    for text in (nested(limit + 1), nested(100_000), '{"a":' * 100_000, nested(limit + 1).encode()):
        with pytest.raises(TextError, match="nested more deeply"):
            read_json(text)
    assert len(read_json("[" + ",".join(["[]"] * 1000) + "]")) == 1000


@pytest.mark.parametrize("text", ["", "{", "[1,]", "'a'", b"\xff\xfe\xfa", "1" * 10_000, "\0"])
def test_what_is_no_json_is_one_error(text):
    with pytest.raises(TextError, match="not JSON"):
        read_json(text)


def test_size_is_bounded():
    with pytest.raises(TextError, match="9 bytes"):
        read_json('"1234567"', most_bytes=8)


@hypothesis.given(text=st.text() | st.binary())
def test_any_text_is_a_value_or_one_error(text):
    with contextlib.suppress(TextError):
        read_json(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from("abcd"), inner, max_size=4),
    max_leaves=10,
)


def check(value):
    """Reads a value of a form that has every kind of value."""
    return JsonReader(value, "it").record(
        {
            "a": lambda it: it.items(JsonReader.count, most=2),
            "b": lambda it: it.optional(lambda table: table.table(JsonReader.number)),
        },
        {
            "c": lambda it: it.fixed(JsonReader.string, JsonReader.flag),
            "d": lambda it: it.one_of(1, "x"),
        },
    )


@hypothesis.given(value=JSON)
def test_any_value_passes_a_check_or_is_one_error(value):
    with contextlib.suppress(TextError):
        check(value)


@pytest.mark.parametrize(
    ("value", "says"),
    [
        ({"a": [1, -1], "b": None}, r"it\.a\[1\] is -1, and not a whole number from 0"),
        ({"a": [True], "b": None}, r"it\.a\[0\] is True"),
        ({"a": [1, 2, 3], "b": None}, r"it\.a is \[1, 2, 3\], and not a list of 0 to 2"),
        ({"a": [2**63], "b": None}, r"it\.a\[0\]"),
        ({"a": []}, "it has no 'b'"),
        ({"a": [], "b": {"x": "1"}}, r"it\.b\['x'\] is '1', and not a finite number"),
        ({"a": [], "b": {"x": float("nan")}}, "finite"),
        ({"a": [], "b": {"x": 10**400}}, "finite"),
        ({"a": [], "b": None, "c": ["x"]}, r"it\.c is \['x'\], and not a list of 2"),
        ({"a": [], "b": None, "d": True}, "it.d is True, and not one of 1, 'x'"),
        ({"a": [], "b": None, "e": 1}, "it has 'e', which is not allowed"),
        ([], "it is \\[\\], and not an object"),
    ],
)
def test_check_says_where_and_what_is_wrong(value, says):
    with pytest.raises(TextError, match=says):
        check(value)


def test_checked_lists_are_tuples():
    assert check({"a": [1, 2], "b": {"x": 1}, "c": ["s", True], "d": "x"}) == {
        "a": (1, 2),
        "b": {"x": 1.0},
        "c": ("s", True),
        "d": "x",
    }

"""Layout maps: the entry that a path selects, and invalid entries. (Their use by strategies:
``strategies/test_layouts.py``.)"""

import re

import hypothesis.strategies as st
import keras
import pytest
from hypothesis import given

from checks import message
from replicax._src.variables.layout_map import LayoutMap, shown
from replicax.errors import InvalidArgumentError

COLUMNS, ROWS = (None, "logical"), ("logical", None)


def test_which_entry_a_path_takes():
    layout_map = LayoutMap(
        {"dense": COLUMNS, "dense/kernel": ROWS, ".*dense_1/kernel": ROWS, "bias$": ("logical",)}
    )
    assert layout_map["dense/kernel"] == (("logical",), ())  # its path, though "dense" is in it too
    assert layout_map["model/dense_1/kernel"] == (("logical",), ())  # all of the path, before a part of it
    assert layout_map["model/dense_2/gamma"] == ((), ("logical",))
    assert layout_map["conv/kernel"] is None
    assert layout_map.get("conv/kernel") is None
    several = message(
        InvalidArgumentError, lambda: layout_map["dense_3/bias"], "'dense_3/bias'", "'dense'", "'bias$'"
    )
    assert "(None, 'logical')" in several
    layout_map["dense_3/bias"] = ()
    assert layout_map["dense_3/bias"] == ()
    del layout_map["bias$"]
    assert len(layout_map) == 4
    assert "bias$" not in layout_map
    assert layout_map["other/bias"] is None


def test_patterns_that_agree_may_both_match():
    layout_map = LayoutMap({"query": COLUMNS, "kernel": [None, "logical"]})
    assert layout_map["query/kernel"] == ((), ("logical",))


@given(
    st.dictionaries(
        st.from_regex(r"[a-c/]{1,3}", fullmatch=True), st.sampled_from([COLUMNS, ROWS, ()]), max_size=4
    ),
    st.from_regex(r"[a-c/]{1,4}", fullmatch=True),
)
def test_without_special_characters_it_is_equality_and_then_containing(entries, path):
    layout_map = LayoutMap(entries)
    wanted = {entries[path]} if path in entries else {entries[key] for key in entries if key in path}
    if len(wanted) > 1:
        with pytest.raises(InvalidArgumentError, match=re.escape(repr(path))):
            layout_map[path]
    else:
        assert layout_map[path] == next((LayoutMap({"x": layout})["x"] for layout in wanted), None)


@pytest.mark.parametrize(
    ("pattern", "layout", "says"),
    [
        ("kernel", "logical", ["'kernel'", "an entry for each dim", "'logical'"]),
        ("kernel", 2, ["got 2"]),
        ("kernel", (None, 2), ["got (None, 2)"]),
        ("kernel", ("logical", "logical"), ["several dims over 'logical'"]),
        ("ker[nel", COLUMNS, ["'ker[nel' is not a regular expression", "unterminated"]),
        (3, COLUMNS, ["regular expressions, got 3"]),
        ("there", COLUMNS, ["has 'there' already", "('logical', None)"]),
    ],
)
def test_invalid_entries(pattern, layout, says):
    layout_map = LayoutMap({"there": ROWS})
    message(InvalidArgumentError, lambda: layout_map.update({pattern: layout}), *says)
    assert list(layout_map) == ["there"]


def test_invalid_maps():
    message(
        InvalidArgumentError, lambda: LayoutMap([("kernel", ROWS)]), "or a dict such as", "got [('kernel',"
    )


def test_layouts_are_shown_as_they_are_written():
    layout_map = LayoutMap({"a": (None, "logical"), "b": (("logical_0", "logical_1"),)})
    assert repr(layout_map) == "LayoutMap({'a': (None, 'logical'), 'b': (('logical_0', 'logical_1'),)})"
    assert [eval(shown(layout)) for _, layout in layout_map.entries()] == [
        COLUMNS,
        (("logical_0", "logical_1"),),
    ]
    message(InvalidArgumentError, lambda: LayoutMap.of(["a"]), "layout_map must be", "['a']")


# --- maps of keras.distribution ------------------------------------------------------------------------


def keras_map(**entries):
    layout_map = keras.distribution.LayoutMap(None)
    for pattern, axes in entries.items():
        layout_map[pattern] = axes
    return layout_map


def test_a_map_of_keras_matches_full_paths_and_ignores_the_axis_of_the_data():
    given = keras_map(**{"dense.*kernel": (None, "model"), "up|down": ("model", "data"), "norm": ("batch",)})
    layout_map = LayoutMap.from_keras(given)
    assert len(layout_map) == 2  # "norm" shards nothing over the devices of a replica
    for path in ("dense_1/kernel", "block/dense_1/kernel", "dense/kernel_1", "up", "down", "upper", "norm"):
        layout = given[path]
        wanted = None if layout is None or "model" not in layout.axes else layout_map[path]
        assert layout_map[path] == wanted
    assert layout_map["dense_1/kernel"] == ((), ("logical",))
    assert layout_map["up"] == layout_map["down"] == (("logical",), ())
    assert layout_map["block/dense_1/kernel"] is layout_map["upper"] is None


def test_other_axes_of_keras_need_a_name():
    given = keras_map(kernel=("fsdp", "tp"))
    message(InvalidArgumentError, lambda: LayoutMap.from_keras(given), "'kernel'", "'fsdp'", "axes={'fsdp'")
    layout_map = LayoutMap.from_keras(given, axes={"fsdp": None, "tp": "logical_0"})
    assert layout_map["kernel"] == ((), ("logical_0",))


@pytest.mark.parametrize("given", [{"kernel": COLUMNS}, LayoutMap(), None, [("kernel", COLUMNS)]])
def test_only_a_map_of_keras_is_one(given):
    message(InvalidArgumentError, lambda: LayoutMap.from_keras(given), "keras.distribution.LayoutMap")

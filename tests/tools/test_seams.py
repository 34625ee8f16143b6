"""``tools/seams.py`` counts what a reader feels, also where the code hides it. The packages here are made up."""

import sys
import textwrap
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import seams
from house import names, parts, signatures, switches, walks
from house.source import AT_RUN_TIME, EVERY_KIND, House, circles_of_files, circles_of_rooms


@pytest.fixture
def house_of(tmp_path):
    def make(files):
        for name, text in {"__init__.py": "", "_src/__init__.py": "", **files}.items():
            path = tmp_path / "replicax" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(textwrap.dedent(text))
        return House(tmp_path)

    return make


PART = "_ps/pool.py"
OF_PART = "replicax._ps.pool"

WAYS_TO_IMPORT = {
    "plain": f"import {OF_PART}",
    "from": "from replicax._ps.pool import Pool",
    "relative": "from ..._ps.pool import Pool",
    "relative module": "from ..._ps import pool",
    "lazy": "def f():\n    from replicax._ps import pool",
    "for checkers": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from replicax._ps.pool import Pool",
    "else of checkers": "import typing\nif not typing.TYPE_CHECKING:\n    from replicax._ps.pool import Pool",
    "string": f"import importlib\nimportlib.import_module('{OF_PART}')",
    "builtin": f"__import__('{OF_PART}')",
    "table": f"PLACES = {{'pool': '{OF_PART}:Pool'}}",
    "joined": "import importlib\nimportlib.import_module('.'.join(['replicax', '_ps', 'pool']))",
    "added": "import importlib\nimportlib.import_module('replicax.' + '_ps' + '.pool')",
    "formatted": "import importlib\nROOT = 'replicax'\nimportlib.import_module(f'{ROOT}._ps.pool')",
    "unknown end": "import importlib\ndef f(x):\n    importlib.import_module(f'replicax._ps.{x}')",
    "percent": "import importlib\ndef f(x):\n    importlib.import_module('replicax._ps.%s' % x)",
    "without the root": "import importlib\nPLACE = '_ps.pool'\ndef f(x):\n    importlib.import_module(f'replicax.{x}')",
    "loaded modules": f"import sys\npool = sys.modules['{OF_PART}']",
    "get of loaded modules": f"import sys\npool = sys.modules.get('{OF_PART}')",
    "public name": "import replicax as rx\nrx.Pool",
    "from public": "from replicax import Pool",
    "public module": "import replicax as rx\nrx.coordinator.Pool",
    "getattr": "import replicax as rx\ngetattr(rx, 'Pool')",
    "passed on": "from replicax._src.values.passing import Pool",
    "renamed": "from replicax._src.values.passing import Other",
}


@pytest.mark.parametrize("way", WAYS_TO_IMPORT)
def test_an_import_of_a_part_is_found_however_it_is_written(house_of, way):
    house = house_of(
        {
            "__init__.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n"
            "    from replicax._ps.pool import Pool\n",
            "coordinator.py": "_PLACES = {'Pool': '_ps.pool'}",
            "_src/values/passing.py": "from replicax._ps.pool import Pool, Pool as Other",
            "_src/context/user.py": WAYS_TO_IMPORT[way],
            PART: "class Pool: pass",
        }
    )
    assert OF_PART in {edge.target for edge in house.edges["replicax._src.context.user"]}


def test_two_uses_of_one_import_are_one_import(house_of):
    house = house_of(
        {
            "_src/context/user.py": "from replicax._ps import pool\n"
            "def f():\n    return pool.Pool, pool.size\n",
            PART: "class Pool: pass\nsize = 3",
        }
    )
    counts = {part: len(parts.imports_of_part(house, part)) for part in parts.PARTS}
    assert counts == {**dict.fromkeys(parts.PARTS, 0), "parameter servers": 1}


@pytest.mark.parametrize(
    "code",
    [
        "import importlib\ndef f(x):\n    importlib.import_module(x)",
        "import importlib\ndef f(x):\n    importlib.import_module(f'{x}.pool')",
        "def f(x):\n    exec(x)",
        "import sys\ndef f(x):\n    return sys.modules[x]",
        "import pkgutil\ndef f(x):\n    return list(pkgutil.iter_modules(x))",
        "from importlib.metadata import entry_points\ndef f(x):\n    return entry_points(group=x)",
    ],
)
def test_an_import_whose_module_the_source_does_not_say_is_counted(house_of, code):
    assert len(house_of({"_src/a/x.py": code}).unsaid) == 1


def test_the_rest_of_a_module_name_counts_where_another_file_imports_it(house_of):
    house = house_of(
        {
            "_src/a/x.py": "from replicax._src.loading import load\nPool = load('_ps.pool:Pool')",
            "_src/loading.py": "import importlib\ndef load(x):\n    return importlib.import_module(f'replicax.{x}')",
            "_ps/pool.py": "class Pool: ...",
        }
    )
    assert len(parts.imports_of_part(house, "parameter servers")) == 1


def test_modules_of_the_package_named_in_data_files_are_found(house_of, tmp_path):
    house = house_of({"_ps/pool.py": ""})
    text = 'pool = "replicax._ps.pool"\nother = "_ps.pool"\nuser = "replicax.Strategy"\n'
    (tmp_path / "replicax" / "places.toml").write_text(text)
    assert house.names_in_data() == ["places.toml: replicax._ps.pool", "places.toml: _ps.pool"]


def test_a_circle_counts_imports_for_checkers_and_by_strings(house_of):
    house = house_of(
        {
            "_src/a/x.py": "import replicax._src.b.y",
            "_src/b/y.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import replicax._src.c.z",
            "_src/c/z.py": "PLACE = 'replicax._src.a.x'",
        }
    )
    assert [len(each) for each in circles_of_files(house, EVERY_KIND)] == [3]
    assert circles_of_files(house, AT_RUN_TIME) == []


def test_a_circle_of_three_folders_is_found_although_no_two_import_each_other(house_of):
    house = house_of(
        {
            "_src/a/x.py": "import replicax._src.b.y",
            "_src/b/y.py": "def f():\n    import replicax._src.c.z",
            "_src/c/z.py": "import replicax._src.a.other",
            "_src/a/other.py": "",
        }
    )
    assert circles_of_rooms(house) == [["_src/a", "_src/b", "_src/c"]]


def test_a_folder_is_the_first_below_the_package_however_deep_the_file(house_of):
    house = house_of({"_src/a/b/c/x.py": "", "_ps/d/y.py": "", "_src/z.py": "", "data.py": ""})
    rooms = [
        house.room_of(f"replicax.{each}") for each in ("_src.a.b.c.x", "_ps.d.y", "_src.z", "data", "_src")
    ]
    assert rooms == ["_src/a", "_ps", "_src", "public", "_src"]
    assert names.loose_files(house) == ["replicax._src.z"]


def test_names_behind_a_module_that_passes_them_on_count_where_they_are_defined(house_of):
    house = house_of(
        {
            "_src/kit.py": "from replicax._src.a.x import one, two\nfrom replicax._src.b.y import three\n"
            "from replicax._src.b import z\n",
            "_src/a/x.py": "one = 1\ntwo = 2",
            "_src/b/y.py": "three = 3",
            "_src/b/z.py": "four = 4",
            "_ps/pool.py": "from replicax._src import kit\nkit.one, kit.two, kit.three, kit.z.four",
        }
    )
    taken = {name for _, name in parts.taken_names(house, "parameter servers")}
    assert {"one", "two", "three"} <= taken
    assert {"replicax._src.a.x", "replicax._src.b.y"} <= parts.modules_behind(house, "parameter servers")
    assert parts.imported_modules(house, "parameter servers") == {"replicax._src.kit"}


def test_all_names_of_a_star_import_count(house_of):
    house = house_of(
        {
            "_src/kit.py": "def one(): ...\nclass Two: ...\nthree = 3",
            "_ps/pool.py": "from replicax._src.kit import *",
        }
    )
    assert len(parts.taken_names(house, "parameter servers")) == 3


def test_members_of_one_name_that_holds_many_count(house_of):
    house = house_of(
        {
            "_src/kit.py": "class Kit:\n    one = 1\n    two = 2",
            "_ps/pool.py": "from replicax._src.kit import Kit\nKit.one + Kit.two",
        }
    )
    assert len(parts.members_of_taken_names(house, "parameter servers")) == 2


def test_a_part_that_moves_to_an_unknown_folder_is_missed(house_of):
    house = house_of({"_src/servers/pool.py": "", "_plan/plan.py": ""})
    assert parts.without_files(house) == {"parameter servers", "launch", "migrate", "testing"}


def test_only_commands_load_other_parts(house_of):
    house = house_of(
        {
            "_plan/plan.py": "",
            "_ps/pool.py": "def f():\n    import replicax._plan.plan",
            "_launch/command.py": "def f():\n    import replicax._plan.plan",
            "_launch/early.py": "import replicax._plan.plan",
        }
    )
    importers = {module for module, _ in parts.imports_between_parts(house)}
    assert importers == {"replicax._ps.pool", "replicax._launch.early"}


def test_the_registry_holds_tables_of_literals_and_names_parts_alone(house_of):
    house = house_of(
        {
            "_src/parts.py": '''\
                """The parts."""
                from typing import Final

                PLACES: Final = {"Pool": "_ps.pool:Pool", "Value": "_src.values.value:Value"}
                OTHERS = dict(Pool="_ps.pool")

                def load(name): ...
            ''',
            "_src/values/value.py": "class Value: ...",
            "_ps/pool.py": "class Pool: ...",
        }
    )
    assert parts.registry_code(house) == ["OTHERS = dict(Pool='_ps.pool')", "def load(name):"]
    assert parts.core_in_registry(house) == {"replicax._src.values.value"}
    assert parts.registry_lines(house) == 4
    assert not any(parts.imports_of_part(house, part) for part in parts.PARTS)


def typed(house_of, code):
    house = house_of(
        {"_src/variables/x.py": code, "_src/a/types.py": "from typing import Any\nTree = dict[str, Any]"}
    )
    modules = signatures.modules_in(house, "variables")
    return signatures.num_any(house, modules), signatures.num_empty(house, modules)


@pytest.mark.parametrize(
    "code",
    [
        "from typing import Any\ndef f(x: Any): ...",
        "from typing import Any\ndef f(x) -> 'list[Any]': ...",
        "from typing import Any as Value\ndef f(x: Value): ...",
        "import typing\ndef f(*, x: typing.Any): ...",
        "from typing import Any\nVALUE = Any\ndef f(*x: VALUE): ...",
        "from typing import Any, TypeAlias\nOne: TypeAlias = Any\nTwo: TypeAlias = list[One]\ndef f(**x: Two): ...",
        "from replicax._src.a.types import Tree\ndef f(x: Tree | None): ...",
        "from typing import Any\nclass C:\n    x: Any",
    ],
)
def test_any_counts_under_each_of_its_names(house_of, code):
    assert typed(house_of, code)[0] == 1


@pytest.mark.parametrize(
    "code",
    [
        "def f(x: object): ...",
        "def f(x): ...",
        "def f(x: 'dict | None'): ...",
        "from collections.abc import Callable\ndef f(x: list[Callable]): ...",
        "def f(x: int): return x.y  # type: ignore",
    ],
)
def test_other_types_that_say_nothing_count(house_of, code):
    assert typed(house_of, code) == (0, 1)


def test_types_that_say_something_do_not_count(house_of):
    code = (
        "from collections.abc import Callable\nclass C:\n    def __eq__(self, other: object) -> bool: ...\n"
    )
    assert typed(house_of, code + "def f(x: Callable[[int], str], y: dict[str, int]) -> None: ...") == (0, 0)


SWITCH = """
import contextvars, threading
planning = contextvars.ContextVar("planning", default=False)

class _Local(threading.local):
    depth = 0

_local = _Local()
_held = {}
_mode = None

def is_planning(): return planning.get()
def depth():
    found = _local.depth
    return found
def mode(): return _mode
def held(): return _held.get(threading.get_ident())
def is_deep(): return depth() > 3
def set_mode(value):
    global _mode
    _mode = value
def hold(value): _held[threading.get_ident()] = value
"""


def test_ambient_values_are_found_behind_functions_that_only_read_them(house_of):
    house = house_of(
        {
            "_src/a/switch.py": SWITCH,
            "_src/b/user.py": "from replicax._src.a import switch\nfrom replicax._src.a.switch import planning as p\n"
            "p.get(), switch.is_planning(), switch.depth(), switch.mode(), switch.held(), switch.is_deep()",
        }
    )
    assert switches.ambient_values(house) == {"planning", "is_planning", "depth", "mode", "held", "is_deep"}
    assert [name for _, _, name in switches.uses_of_switches(house)] == ["planning"]


def test_file_names_that_mean_the_same_count_once_more_under_other_spellings(house_of):
    house = house_of(
        {
            f"_src/{name}.py": ""
            for name in ("a/step", "b/steps", "c/steps2", "d/d_step", "e/other", "f/other")
        }
    )
    assert names.repeated_file_names(house) == ["other.py"]
    assert names.repeated_concepts(house) == ["other", "step"]


def test_a_list_of_public_names_counts_however_it_is_split(house_of):
    public = [f"Name{number}" for number in range(8)]
    house = house_of(
        {
            "__init__.py": f"from replicax._src.a.x import {', '.join(public)}\n__all__ = {public}\n"
            f"A = {public[:4]}\nB = '{' '.join(public[4:])}'.split()",
            "_src/a/x.py": "",
            "_src/places.py": f"PLACES = {dict.fromkeys(public, 'a.x')}",
            "__init__.pyi": f"from replicax._src.a.x import {', '.join(public)}\n",
        }
    )
    assert names.lists_of_public_names(house) == {"replicax/__init__.py": 3, "replicax/_src/places.py": 1}


@pytest.mark.parametrize("code", ["x.mode = 1", "setattr(x, 'mode', 1)", "vars(x)['mode'] = 1", "del x.mode"])
def test_a_file_that_changes_another_module_is_found(house_of, code):
    house = house_of({"_src/a/x.py": "mode = 0", "_src/b/y.py": f"from replicax._src.a import x\n{code}"})
    assert [module for module, _, _ in names.assignments_to_modules(house)] == ["replicax._src.b.y"]


@pytest.mark.parametrize(
    "code",
    [
        "def f(worker):\n    with worker.lock: ...",
        "def f(self):\n    with self.worker.changed: ...",
        "def f(worker):\n    worker.lock.acquire()",
        "def f(worker):\n    lock = worker.lock",
        "def f(worker):\n    g(worker.changed)",
    ],
)
def test_a_lock_of_another_object_is_found_under_any_name(house_of, code):
    owner = (
        "import threading\nclass C:\n    def __init__(self):\n        self.changed = threading.Condition()\n"
    )
    assert len(names.uses_of_foreign_locks(house_of({"_src/a/x.py": owner, "_src/a/y.py": code}))) == 1


def test_the_longest_file_counts_code_without_docstrings_and_comments(house_of):
    house = house_of({"_src/a/x.py": '"""Text.\n\nMore.\n"""\n\n# Why.\nx = 1\ny = 2\n'})
    assert house.code_lines("replicax._src.a.x") == 2


class Holder:
    __slots__ = ("kept",)

    def __init__(self, kept):
        self.kept = kept


WAYS_TO_PASS = {
    "an argument": lambda x, old: {"x": x},
    "a dict": lambda x, old: {"given": {"x": (x,)}},
    "an object": lambda x, old: {"self": Holder([Holder(x)])},
    "a closure": lambda x, old: {"call": lambda: x},
    "a bound method": lambda x, old: {"call": Holder(x).__init__},
    "an attribute of an older object": lambda x, old: setattr(old, "kept", [x]) or {"self": old},
}


@pytest.mark.parametrize("way", WAYS_TO_PASS)
def test_a_function_gets_the_data_however_it_is_passed(way):
    import numpy as np

    x, old = np.full(3, 0.7109375), Holder(None)
    reach = walks.Reach(lambda value: isinstance(value, np.ndarray) and value[0] == 0.7109375)
    assert reach(WAYS_TO_PASS[way](x, old))
    assert reach(WAYS_TO_PASS[way](x.copy(), old))
    old.kept = None
    assert not reach({"self": Holder([old]), "x": np.zeros(3)})


def test_a_climb_is_found_when_the_rows_of_layers_are_moved():
    call = walks.Call("_src/jax_compat.py", "trace", "_src/lowering/view.py", "flat")
    walk = walks.Walk({call: None})
    below = {"_src/lowering/view.py": {"_src/jax_compat.py"}}
    assert walk.climbs({"jax_compat": 0, "lowering": 1}, {}) == [call]
    assert walk.climbs({"jax_compat": 0, "lowering": 0}, {}) == []
    assert walk.climbs({"jax_compat": 1, "lowering": 0}, below) == [call]


def test_a_finder_that_only_a_cold_import_of_replicax_leaves_is_an_import_hook():
    assert walks.printed_alone("import_hooks") == ["replicax._src.keras.import_errors._Finder"]


def test_the_opener_is_the_file_that_defines_the_function():
    first = walks.Call("_src/input/sources.py", "open_source", "_src/input/new_name.py", "describe")
    inner = walks.Call("_src/input/new_name.py", "describe", "_src/input/new_name.py", "_open")
    again = walks.Call("_src/input/elements.py", "count", "_src/input/new_name.py", "_open.<locals>.<lambda>")
    walk = walks.Walk(dict.fromkeys((first, inner, again)))
    assert walk.entries("describe") == [first, again]
    with pytest.raises(SystemExit, match="OPENER"):
        walk.entries("open_dataset")


LIMITS = {"a": seams.Limit(3, 0), "b": seams.Limit(5, None, True)}


def test_a_row_over_its_ceiling_or_without_one_or_no_longer_measured_fails():
    rows = [seams.Row("a", 4), seams.Row("c", 1)]
    failing = seams.failures(rows, LIMITS, with_walks=True)
    assert [line.partition(":")[0] for line in failing] == ["a", "b", "c"]
    assert not seams.failures([seams.Row("a", 3), seams.Row("b", 5)], LIMITS, with_walks=True)


def test_a_ceiling_follows_its_row_down_and_never_up(capsys):
    rows = [seams.Row("a", 2), seams.Row("b", 1)]
    assert seams.lowered(rows, LIMITS) == {"a": seams.Limit(2, 0), "b": LIMITS["b"]}
    assert seams.lowered([seams.Row("a", 4), seams.Row("b", 5)], LIMITS) == LIMITS
    assert seams.check(rows, LIMITS, with_walks=True) == 0
    assert "a: the ceiling can come down from 3 to 2" in capsys.readouterr().out


def test_the_file_of_limits_is_what_the_tool_writes():
    text = seams.LIMITS.read_text()
    assert seams.written(seams.limits(), seams.header_of(text)) == text

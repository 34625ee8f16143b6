"""Imports go only downwards, and importing replicax has no side effects. Most tests read syntax trees."""

import ast
import functools
import importlib.util
import itertools
import json
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import replicax as rx
from replicax._src.hooks import load
from replicax._src.parts import HOOKS, PUBLIC

PACKAGE = Path(__file__).parents[1] / "src" / "replicax"
PRIVATE = PACKAGE / "_src"
ROOT = PACKAGE.parents[1]
FOLDERS = {path.parent.name for path in PRIVATE.glob("*/__init__.py")}
CORE_TREE = runpy.run_path(str(ROOT / "tools" / "core_tree.py"))
STUBS = runpy.run_path(str(ROOT / "tools" / "public_stubs.py"))

# The folders of src/replicax/_src, and the files beside them, from the floor up. A file imports from its own row and
# from those below, for type checkers too.
LAYERS = (
    "vocabulary packaging untrusted drawing parts hooks",
    "user jax_internals",
    "control wire",
    "cluster",
    "status",
    "devices",
    "values",
    "tracing",
    "collectives",
    "fault_tolerance",
    "scope",
    "variables",
    "lowering",
    "input",
    "strategies",
    "functions",
    "checkpoint",
    "frameworks",
    "preemption",
    "summaries profiling",
    "keras",
    "diagnostics",
    "program_kit",
)
# The parts beside the core, and what each may import: the core, and inside a command that needs them, other parts.
PARTS = {row["folder"]: tuple(row["imports"]) for row in CORE_TREE["PARTS"].values()}
# All that they have comes from a part.
PUBLIC_MODULES_OF_PARTS = ("replicax.pytest_plugin", "replicax.ray", "replicax.testing")
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names.split()}

# The ways up, for type checkers only.
UPWARDS = {
    ("cluster/tpu", "devices/tpu/positions"),
}

BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "base", "lib", "core"}

FILES = sorted(PRIVATE.rglob("*.py"))
FILES_OF_PARTS = {part: sorted((PACKAGE / part).rglob("*.py")) for part in PARTS}
PRIVATE_FILES = [*FILES, *(file for files in FILES_OF_PARTS.values() for file in files)]


def name_of(file: Path) -> str:
    """``tracing/tape`` for ``src/replicax/_src/tracing/tape.py``; a folder's ``__init__`` is the folder."""
    return file.relative_to(PRIVATE).with_suffix("").as_posix().removesuffix("__init__").rstrip("/")


def ids(file: Path) -> str:
    return file.relative_to(PACKAGE).as_posix()


def layer_of(name: str) -> int | None:
    return LAYER_OF.get(name.partition("/")[0])


def is_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")


@functools.cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@functools.cache
def imports_of(file: Path, *, with_types: bool = True) -> frozenset[str]:
    """The dotted names that a file imports anywhere, ``from a import b`` as ``a.b``.

    ``with_types=False`` leaves out imports for type checkers. Modules that a function imports by name with importlib
    are not included: these are frameworks that the user may not have imported.
    """
    names = set()
    nodes: list[ast.AST] = [parsed(file)]
    while nodes:
        node = nodes.pop()
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file}:{node.lineno}: a relative import; write it in full"
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
        elif with_types or not is_for_types_only(node):
            nodes.extend(child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr))
    return frozenset(names)


def imported_files(file: Path, *, with_types: bool = True) -> set[str]:
    """The names of the files of ``_src`` that a file imports."""
    names = set()
    for dotted in imports_of(file, with_types=with_types):
        if not (dotted + ".").startswith("replicax._src."):
            continue
        path = dotted.removeprefix("replicax._src").lstrip(".").replace(".", "/")
        while path and not (PRIVATE / f"{path}.py").exists() and not (PRIVATE / path).is_dir():
            path = path.rpartition("/")[0]  # the last part is a name in the file
        names.add(path)
    return names


def may_import(importer: str, imported: str) -> bool:
    high, low = layer_of(importer), layer_of(imported)
    return (importer, imported) in UPWARDS or (high is not None and low is not None and low <= high)


def test_every_file_has_a_layer():
    names = [name_of(file) for file in FILES if file.name != "__init__.py"]
    missing = [name for name in names if layer_of(name) is None]
    assert not missing, "add them to LAYERS, and to the layout in docs/architecture.md"


def test_every_layer_has_its_files():
    assert [
        name for name in LAYER_OF if not (PRIVATE / name).is_dir() and not (PRIVATE / f"{name}.py").exists()
    ] == []


def test_the_picture_and_the_page_of_the_architecture_have_every_folder_in_the_order_of_the_layers():
    drawn = runpy.run_path(str(ROOT / "docs" / "pictures" / "draw.py"))
    in_picture = [re.findall(r"\w+", folders) for folders, _, _ in drawn["CORE"]]
    page = (ROOT / "docs" / "architecture.md").read_text().partition("| folder of")[2].partition("\n\n")[0]
    in_page = [re.findall(r"`(\w+)/`", row.split("|")[1]) for row in page.splitlines()[2:]]
    assert [folder for folder, _ in drawn["PARTS"]] == list(PARTS)
    assert [row[0] for row in in_page[: len(PARTS)]] == list(PARTS)
    for rows in (in_picture, in_page[len(PARTS) :]):
        folders = [[name for name in row if (PRIVATE / name).is_dir()] for row in rows]
        assert {name for row in folders for name in row} == FOLDERS
        layers = [[LAYER_OF[name] for name in row] for row in folders]
        assert all(min(above) >= max(below) for above, below in itertools.pairwise(layers))


def test_the_ways_up_are_for_type_checkers_only():
    for file, upper in UPWARDS:
        assert upper in imported_files(PRIVATE / f"{file}.py")
        assert upper not in imported_files(PRIVATE / f"{file}.py", with_types=False)


def test_imports_go_downwards():
    wrong = [
        f"{name} (layer {layer_of(name)}) may not import {imported or 'replicax._src'} (layer {layer_of(imported)})"
        for file in FILES
        for name in [name_of(file)]
        if file.name != "__init__.py"
        for imported in sorted(imported_files(file, with_types=True))
        if not may_import(name, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_only_the_registry_names_diagnostics():
    """It listens to events of the code below it, which runs without it."""
    naming = [
        ids(file)
        for file in PACKAGE.rglob("*.py")
        if not ids(file).startswith("_src/diagnostics/") and "_src.diagnostics" in file.read_text()
    ]
    assert naming == ["_src/parts.py"]


def test_neither_the_core_nor_a_public_module_imports_a_part():
    public = [
        file for file in PACKAGE.rglob("*.py") if not file.relative_to(PACKAGE).parts[0].startswith("_")
    ]
    importing = [
        f"{ids(file)} imports {dotted}"
        for file in (*FILES, *public, PACKAGE / "__init__.py", PACKAGE / "__main__.py")
        for dotted in imports_of(file, with_types=True)
        if dotted.split(".")[0] == "replicax" and dotted.split(".")[1] in PARTS
    ]
    assert not importing, "ask the registry: hooks.py"


@pytest.mark.parametrize("part", PARTS)
def test_a_part_imports_only_what_its_row_allows(part):
    assert FILES_OF_PARTS[part]
    wrong = [
        f"{ids(file)} imports {dotted}"
        for file in FILES_OF_PARTS[part]
        for dotted in imports_of(file, with_types=True)
        if dotted.split(".")[0] == "replicax" and dotted.split(".")[1] not in (part, *PARTS[part])
    ]
    assert not wrong


# The program kit: all that parameter servers take from the core. Private folders export nothing (below); the modules of
# this one are the exception, so that what the core promises to parameter servers can be read in one place.
KIT = "replicax._src.program_kit"
MOST_KIT_MODULES = 12


def names_from_kit(file: Path) -> set[str]:
    """``module.name`` for each name of the kit that a file uses; a module of it is used as ``module.name``."""
    names = set()
    for dotted in imports_of(file):
        if not dotted.startswith(f"{KIT}."):
            continue
        taken = dotted.removeprefix(f"{KIT}.")
        if "." in taken:
            names.add(taken)
            continue
        names |= {
            f"{taken}.{node.attr}"
            for node in ast.walk(parsed(file))
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == taken
        }
    return names


def test_parameter_servers_take_names_of_the_core_from_the_program_kit_alone():
    others = [
        f"{ids(file)} imports {dotted}"
        for file in FILES_OF_PARTS["_ps"]
        for dotted in imports_of(file)
        if dotted.startswith("replicax._src.") and not dotted.startswith(f"{KIT}.")
    ]
    assert not others, "take it from the program kit, which may need a module of that subject"


def test_the_program_kit_has_no_name_that_parameter_servers_do_not_use():
    used = set().union(*map(names_from_kit, FILES_OF_PARTS["_ps"]))
    files = [file for file in (PRIVATE / "program_kit").glob("*.py") if file.name != "__init__.py"]
    offered = {
        f"{file.stem}.{alias.name}"
        for file in files
        for node in parsed(file).body
        if isinstance(node, ast.ImportFrom) and node.module != "__future__"
        for alias in node.names
    }
    assert offered == used
    assert len(files) <= MOST_KIT_MODULES


def test_only_parameter_servers_import_the_program_kit_and_only_their_part_of_keras_its_keras_names():
    importing = {
        ids(file): dotted
        for file in PACKAGE.rglob("*.py")
        for dotted in imports_of(file)
        if dotted.startswith(f"{KIT}.") and not ids(file).startswith("_ps/")
    }
    assert not importing
    assert {
        ids(file)
        for file in FILES_OF_PARTS["_ps"]
        if any(name.startswith("keras_variables.") for name in names_from_kit(file))
        if not ids(file).startswith("_ps/keras/")
    } == set()


def test_the_command_loads_other_parts_only_when_it_needs_them():
    at_the_top = {
        f"{ids(file)} imports {dotted}"
        for file in FILES_OF_PARTS["_launch"]
        if not file.name.startswith("planned_")  # which `replicax plan` loads
        for node in parsed(file).body
        if isinstance(node, ast.ImportFrom)
        for dotted in (str(node.module),)
        if dotted.split(".")[:1] == ["replicax"] and dotted.split(".")[1] not in ("_src", "_launch")
    }
    assert not at_the_top


def test_migrate_imports_nothing_that_replicax_runs_on():
    """People who migrate have TensorFlow, and may have neither JAX nor Keras."""
    outside = [
        f"{ids(file)} imports {dotted}"
        for file in FILES_OF_PARTS["_migrate"]
        for dotted in imports_of(file, with_types=True)
        if dotted.split(".")[0] in ("jax", "keras", "numpy", "tensorflow")
    ]
    assert not outside


def test_no_test_of_the_core_needs_a_part():
    """`make test-core` runs them in a tree without the parts."""
    of_parts = (*(f"replicax.{part}" for part in PARTS), *PUBLIC_MODULES_OF_PARTS)
    needing = [
        f"{name} imports {dotted}"
        for name in CORE_TREE["files"]()
        if name.startswith("tests/") and name.endswith(".py")
        for dotted in imports_of(ROOT / name)
        if f"{dotted}.".startswith(tuple(f"{part}." for part in of_parts))
    ]
    assert not needing, "move them to the tests of the part"
    helpers = {
        path.stem for path in (ROOT / "tests").glob("*.py") if f"tests/{path.name}" in CORE_TREE["WHOLE"]
    }
    needing = [
        f"{name} imports {dotted}"
        for name in CORE_TREE["files"]()
        if name.startswith("tests/") and name.endswith(".py")
        for dotted in imports_of(ROOT / name)
        if dotted.split(".")[0] in helpers
    ]
    assert not needing, "these helpers are not in the core's tree"


def test_private_files_do_not_import_public_ones():
    public = {
        (name_of(file), dotted)
        for file in FILES
        for dotted in imports_of(file, with_types=True)
        if dotted.split(".")[0] == "replicax" and not (dotted + ".").startswith("replicax._src.")
    }
    assert not public


def test_private_folders_export_nothing():
    exporting = [
        ids(file)
        for file in PRIVATE_FILES
        if file.name == "__init__.py" and imports_of(file, with_types=True)
    ]
    assert not exporting, "import from the file that holds the name"


def test_no_import_cycles():
    graph = {name_of(file): imported_files(file, with_types=False) for file in FILES}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " -> ".join((*path, name))
        if name not in done:
            for imported in graph.get(name, ()):
                visit(imported, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_only_the_registry_names_modules_in_strings():
    """A string that names a module is an import that no other test here sees, except in the command of a process."""
    naming = {
        (name_of(file), node.value)
        for file in FILES
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and is_module(node.value)
        if f'"-m", "{node.value}"' not in file.read_text()
    }
    assert {name for name, _ in naming} == {"parts"}


def is_module(text: str) -> bool:
    path = text.removeprefix("replicax.").replace(".", "/")
    return text.startswith("replicax._") and (PACKAGE / f"{path}.py").exists()


def test_only_jax_compat_knows_jax_internals():
    others = [
        file for file in PACKAGE.rglob("*.py") if not file.name.startswith(("jax_compat", "coordination"))
    ]
    for file in others:
        source = file.read_text()
        assert "jax._src" not in source, file
        assert "jax.__version__" not in source, file
        assert not [name for name in imports_of(file) if name.startswith(("jax._src", "jaxlib"))], file


def test_no_code_uses_hasattr():
    asking = [ids(file) for file in PRIVATE_FILES if "hasattr(" in file.read_text()]
    assert not asking, "use isinstance; or getattr, where another version of a package lacks a name"


def test_no_public_list_of_hooks_is_filled_by_other_modules():
    """A framework's actions are in its ``Framework``, so a reader of a module sees all that it calls."""
    lists = {
        f"{ids(file)}:{node.target.id}"
        for file in PRIVATE_FILES
        for node in parsed(file).body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        if "list[" in ast.unparse(node.annotation) and "__" not in node.target.id
        if not node.target.id.startswith("_")
    }
    assert not lists


def test_files_are_named_after_concepts():
    for path in PACKAGE.rglob("*"):
        words = set(path.stem.split("_")) | {path.stem}
        assert not words & (BANNED_NAMES | {"v1", "v2"}), path


def test_each_public_name_is_where_replicax_looks_for_it():
    assert {name for name in rx.__all__ if getattr(rx, name, None) is None} == set()
    assert set(rx.__all__) <= set(dir(rx))


@pytest.mark.parametrize("module", STUBS["modules"]())
def test_stubs_for_type_checkers_are_current(module):
    assert STUBS["path_of"](module).read_text() == STUBS["text_of"](module), "write them: make pages"


def test_the_registry_is_only_a_table_and_names_each_part():
    nodes = parsed(PRIVATE / "parts.py").body[2:]  # without the docstring and the import
    for node in nodes:
        assert isinstance(node, ast.AnnAssign), ast.unparse(node)
        ast.literal_eval(node.value)
    for module in (*HOOKS.values(), *(place for place, _, _ in PUBLIC)):
        assert importlib.util.find_spec(module) is not None, module
    named = {module.split(".")[1] for module in (*HOOKS.values(), *(place for place, _, _ in PUBLIC))}
    assert set(PARTS) <= named


WITHOUT_PART = """
import sys
part, name = sys.argv[1:]
sys.modules[part] = None  # as if the folder were missing
import replicax as rx
try:
    eval(name)
except ImportError as error:
    assert isinstance(error, rx.errors.MissingPartError), repr(error)
    print(error)
assert rx.OneDeviceStrategy("cpu:0").num_replicas_in_sync == 1
"""


def test_the_error_for_a_missing_folder_names_that_folder():
    with pytest.raises(rx.errors.MissingPartError, match=r"lacks src/replicax/_src/elsewhere\. Restore it"):
        load("replicax._src.elsewhere.page")


@pytest.mark.parametrize(
    ("part", "module", "name"),
    [
        ("_plan", "replicax._plan.pictures.visualize", "rx.visualize"),
        ("_ps", "replicax._ps.strategy.parameter_server", "rx.ParameterServerStrategy"),
        pytest.param(
            "_ps",
            "replicax._ps.coordinator.cluster_coordinator",
            "rx.coordinator.ClusterCoordinator",
            marks=pytest.mark.rest,
        ),
    ],
)
def test_a_name_of_a_missing_part_says_which_folder_is_missing(part, module, name):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PART, f"replicax.{part}", name],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert f"{module} is not there: this checkout of replicax lacks src/replicax/{part}" in done.stdout


# The launcher, and the process beside worker 0, start without JAX. Asking for a missing name does not import it either.
WITHOUT_JAX = """
import sys
import replicax, replicax.__main__, replicax._src.cluster.controller_process, replicax._src.jax_internals.coordination
from replicax._src.hooks import hook
hook("command_line")
assert not hasattr(replicax, "MirorredStrategy")
assert not {"jax", "keras", "orbax"} & set(sys.modules)
from replicax.data import from_arrays
from replicax.nn import compute_average_loss
import numpy as np
assert float(compute_average_loss(np.ones(4), global_batch_size=2)) == 2  # asks for the default strategy
assert replicax.get_strategy() is replicax.get_strategy()
assert not replicax.has_strategy()
"""


def test_frequent_processes_start_without_jax():
    subprocess.run([sys.executable, "-c", WITHOUT_JAX], check=True, timeout=120)


IMPORT_AND_REPORT = """
import json, os, sys
from jax._src import xla_bridge  # no public name tells; and jax itself writes the environment when imported
environment = dict(os.environ)
from replicax import *
print(json.dumps({
    "modules": sorted({name.split(".")[0] for name in sys.modules}),
    "is_backend_started": xla_bridge.backends_are_initialized(),
    "is_environment_unchanged": environment == dict(os.environ),
}))
"""


def test_importing_has_no_side_effects():
    run = subprocess.run(
        [sys.executable, "-c", IMPORT_AND_REPORT], capture_output=True, text=True, check=True, timeout=120
    )
    report = json.loads(run.stdout)
    assert not {"tensorflow", "keras", "flax", "optax", "grain", "torch", "pyarrow", "tensorboardX"} & set(
        report["modules"]
    )
    assert not report["is_backend_started"]
    assert report["is_environment_unchanged"]
    assert not run.stderr


def test_lines_of_docstrings_have_at_most_120_characters():
    wide = []
    for file in PACKAGE.rglob("*.py"):
        lines = file.read_text().splitlines()
        for node in ast.walk(parsed(file)):
            if (
                isinstance(node, ast.Expr)
                and isinstance(node.value, ast.Constant)
                and isinstance(node.value.value, str)
            ):
                numbers = range(node.lineno, node.end_lineno + 1)
                wide += [f"{ids(file)}:{number}" for number in numbers if len(lines[number - 1]) > 120]
    assert wide == []

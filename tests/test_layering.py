"""Imports go only downwards, and importing replicax has no side effects. The tests read the syntax trees."""

import ast
import functools
import json
import subprocess
import sys
from pathlib import Path

import replicax as rx

PACKAGE = Path(__file__).parents[1] / "src" / "replicax"
PRIVATE = PACKAGE / "_src"

# The folders of src/replicax/_src, and the files beside them, from the floor up. A file imports from its own row and
# from those below; for type checkers it may import anything.
LAYERS = (
    "errors options version dtypes extras user_code tracebacks home narrowing keras_backend keras_import program_guard "
    "coordination jax_compat_names jax_compat drawing file_access strict_json",
    "migrate public_names",
    "wire",
    "cluster status",
    "devices",
    "values framework precision",
    "tracing",
    "collectives",
    "context",
    "variables",
    "lowering",
    "input",
    "strategies function gradients nn control accumulation",
    "checkpoint",
    "frameworks",
    "parameter_servers",
    "preemption",
    "summaries profiling pictures",
    "keras",
    "plan cli testing ray",
)
LAYER_OF = {name: number for number, names in enumerate(LAYERS) for name in names.split()}

# The ways up: two methods of ``Strategy`` import the edge when they are called.
UPWARDS = {
    ("strategies/strategy", "plan/planning"),
    ("strategies/strategy", "plan/plan"),
    ("strategies/strategy", "pictures/strategies"),
}

BANNED_NAMES = {"util", "utils", "helper", "helpers", "common", "misc", "base", "lib", "core"}

FILES = sorted(PRIVATE.rglob("*.py"))


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


def test_imports_go_downwards():
    wrong = [
        f"{name} (layer {layer_of(name)}) may not import {imported or 'replicax._src'} (layer {layer_of(imported)})"
        for file in FILES
        for name in [name_of(file)]
        if file.name != "__init__.py"
        for imported in sorted(imported_files(file, with_types=False))
        if not may_import(name, imported)
    ]
    assert not wrong, "\n".join(wrong)


def test_private_files_do_not_import_public_ones():
    public = [
        (ids(file), dotted)
        for file in FILES
        for dotted in imports_of(file, with_types=True)
        if dotted.split(".")[0] == "replicax" and not (dotted + ".").startswith("replicax._src.")
    ]
    assert not public


def test_private_folders_export_nothing():
    exporting = [
        ids(file) for file in FILES if file.name == "__init__.py" and imports_of(file, with_types=True)
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
    asking = [ids(file) for file in FILES if "hasattr(" in file.read_text()]
    assert not asking, "use isinstance; or getattr, where another version of a package lacks a name"


def test_no_module_has_hooks_that_others_fill():
    """A framework's actions are in its ``Framework``, so a reader of a module sees all that it calls."""
    lists = {
        f"{name_of(file)}:{node.target.id}"
        for file in FILES
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
    tree = ast.parse((PACKAGE / "__init__.py").read_text())
    for_checkers = next(node for node in tree.body if isinstance(node, ast.If))
    modules = {alias.name for node in for_checkers.body if node.module == "replicax" for alias in node.names}
    places = {
        alias.name: node.module.removeprefix("replicax._src.")
        for node in for_checkers.body
        if node.module != "replicax"
        for alias in node.names
    }
    assert (set(rx._MODULES), rx._PLACES) == (modules, places)
    assert sorted(rx.__all__) == sorted([*modules, *places])
    assert {name for name in rx.__all__ if getattr(rx, name, None) is None} == set()
    assert set(rx.__all__) <= set(dir(rx))


# The parts that start without JAX: the launcher and what is beside worker 0. A missing attribute is none.
WITHOUT_JAX = """
import sys
import replicax, replicax.__main__, replicax._src.cluster.service, replicax._src.coordination
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

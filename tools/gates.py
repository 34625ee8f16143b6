"""Measures how hard the code is to read: ``make gates`` prints it as a table.

Each row is one gate: what it counts, the count, and the limit. The counts come from the files, or from a
process that imports replicax and runs a program.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

ROOT: Final = Path(__file__).resolve().parents[1]
PRIVATE: Final = ROOT / "src" / "replicax" / "_src"
# Parameter servers have their own target. The public modules were added after the target was set.
PARAMETER_SERVERS: Final = ("parameter_servers/", "wire/")
FRONT_DOOR: Final = (
    "migrate/",
    "pictures/",
    "checkpoint/polling.py",
    "cli/doctor_test.py",
    "cli/failed_start.py",
    "cli/gpus.py",
    "cli/migrate.py",
    "cli/script_keras.py",
    "extras.py",
    "keras/data_model.py",
    "keras/sidecar_evaluator.py",
    "keras/tensorboard_callback.py",
    "keras_backend.py",
    "tracing/finite.py",
    "tracing/local_means.py",
    "tracing/side_effects.py",
    "cluster/progress.py",
    "public_names.py",
    "strategies/drift.py",
    "strategies/mistakes.py",
    "migrate/tensorflow_code.py",
    "tracebacks.py",
)
PROBE_LIMIT_S: Final = 120


@final
@dataclass(frozen=True)
class Gate:
    """One row of the table.

    Attributes:
      what: The quantity that is counted.
      now: The counts, in the order of ``most``.
      most: The limits.
    """

    what: str
    now: tuple[int, ...]
    most: tuple[int, ...]

    @property
    def is_met(self) -> bool:
        return all(now <= most for now, most in zip(self.now, self.most, strict=True))


def gates() -> list[Gate]:
    """All gates, measured now."""
    found = probed()
    sources = {path: path.read_text() for path in sorted(PRIVATE.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in sources.items()}
    names = sources[PRIVATE / "jax_compat_names.py"]
    return [
        Gate("files entered by a hot `run` / a cold `run`", (found["hot"], found["cold"]), (7, 12)),
        Gate("lists of hooks that are filled at import", (len(found["hooks"]),), (0,)),
        Gate("attributes of Keras that are patched", (len(found["patched"]),), (10,)),
        Gate("import hooks", (found["import_hooks"],), (0,)),
        Gate("files that count references", (num_users(trees, "getrefcount"),), (1,)),
        Gate(
            "copies of code objects with other globals", (num_code_copies(trees, other_globals=True),), (0,)
        ),
        Gate(
            "with other cells: docs/explanation/design/004",
            (num_code_copies(trees, other_globals=False),),
            (1,),
        ),
        Gate(
            "lowering rules of JAX overridden for the whole process", (num_lowering_overrides(trees),), (0,)
        ),
        Gate("names from `jax._src` without their issue", (num_private_names_of_jax(names),), (0,)),
        Gate(
            "those of which no issue exists: what to ask for", (names.count("# no upstream issue: "),), (4,)
        ),
        Gate("`strategy: Any`", (sum(text.count("strategy: Any") for text in sources.values()),), (0,)),
        Gate("rows of the layer test", (num_layer_rows(),), (20,)),
        Gate("words of our own in the glossary", (num_own_words(),), (20,)),
        Gate(
            "lines of docs/architecture.md",
            (len((ROOT / "docs/architecture.md").read_text().splitlines()),),
            (120,),
        ),
        Gate("code lines of the core", (core_lines(sources, trees),), (24_500,)),
    ]


def num_users(trees: dict[Path, ast.Module], name: str) -> int:
    """The number of files that use a name of another module."""
    return sum(any(getattr(node, "attr", None) == name for node in ast.walk(tree)) for tree in trees.values())


def nodes_of(trees: dict[Path, ast.Module]) -> Iterator[ast.AST]:
    return (node for tree in trees.values() for node in ast.walk(tree))


def calls_of(trees: dict[Path, ast.Module], name: str) -> Iterator[ast.Call]:
    """Calls of a function or a method ``name``."""
    for node in nodes_of(trees):
        if isinstance(node, ast.Call) and name in (
            getattr(node.func, "id", None),
            getattr(node.func, "attr", None),
        ):
            yield node


def num_code_copies(trees: dict[Path, ast.Module], *, other_globals: bool) -> int:
    """Functions that are made of another function's code: ``FunctionType(...)``, with that function's globals or not."""
    made = (list(map(ast.unparse, call.args[:2])) for call in calls_of(trees, "FunctionType"))
    return sum(
        (code.removesuffix("__code__") != names.removesuffix("__globals__")) == other_globals
        for code, names in made
    )


def num_lowering_overrides(trees: dict[Path, ast.Module]) -> int:
    """Lowering rules registered for a primitive that is not ours. Ours are made beside the call, as
    ``primitive``."""
    return sum(ast.unparse(call.args[0]) != "primitive" for call in calls_of(trees, "register_lowering"))


def num_private_names_of_jax(text: str) -> int:
    """How many names of ``jax._src``, in the list of what jax_compat.py uses, have nothing beside them.

    Beside a name stands its issue of JAX, or what one would have to ask for.
    """
    count, module = 0, ""
    for line in text.splitlines():
        module = found[1] if (found := re.match(r'    "([\w.]+)": \(', line)) else module
        if module.startswith("jax._src") and not re.search(
            r"#.*(jax#\d+|https://|no upstream issue: \w+)", line
        ):
            count += sum(name != module for name in re.findall(r'"([\w.]+)"', line))
    return count


def num_layer_rows() -> int:
    tree = ast.parse((ROOT / "tests/test_layering.py").read_text())
    values = {ast.unparse(node.targets[0]): node.value for node in tree.body if isinstance(node, ast.Assign)}
    return len(values["LAYERS"].elts)  # type: ignore[attr-defined]


def num_own_words() -> int:
    """The number of entries of the glossary under its heading for our own words; without that heading, all
    entries."""
    text = (ROOT / "docs/reference/glossary.md").read_text()
    own = re.split(r"^## .*\bour own\b.*$", text, flags=re.MULTILINE | re.IGNORECASE)[-1]
    return len(re.findall(r"^- \*\*", own.split("\n## ")[0], flags=re.MULTILINE))


def core_lines(sources: dict[Path, str], trees: dict[Path, ast.Module]) -> int:
    core = [
        path
        for path in sources
        if not str(path.relative_to(PRIVATE)).startswith((*PARAMETER_SERVERS, *FRONT_DOOR))
    ]
    return sum(code_lines(sources[path], trees[path]) for path in core)


def code_lines(text: str, tree: ast.Module) -> int:
    """Lines of code, without docstrings, comments and blank lines."""
    documented: set[int] = set()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        first = node.body[0] if node.body else None
        if (
            isinstance(first, ast.Expr)
            and isinstance(first.value, ast.Constant)
            and isinstance(first.value.value, str)
        ):
            documented.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    lines = enumerate(map(str.strip, text.splitlines()), 1)
    return sum(1 for number, line in lines if line and number not in documented and not line.startswith("#"))


def probed() -> dict:
    """Counts in a process that imports replicax and runs a program: see ``probe``."""
    environment = os.environ | {"KERAS_BACKEND": "jax", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, __file__, "--probe"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROBE_LIMIT_S,
    )
    if run.returncode:
        raise SystemExit(
            f"gates: the process that runs a program failed with {run.returncode}:\n{run.stderr}"
        )
    return json.loads(run.stdout.splitlines()[-1])


def probe() -> dict:
    """Runs a program in this process, and counts what a reader would have to know."""
    import jax

    jax.config.update("jax_num_cpu_devices", 2)
    import keras

    before = attributes_of(keras)
    finders = set(map(id, sys.meta_path))
    import replicax as rx

    strategy = rx.MirroredStrategy()
    with strategy.scope():
        variable = rx.Variable(1.0)
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", jit_compile=False)

    def step(x):
        variable.assign_add(x)
        return variable + x

    value = strategy.replicate(jax.numpy.float32(1.0))
    cold = files_entered(lambda: strategy.run(step, (value,)))
    hot = files_entered(lambda: strategy.run(step, (value,)))
    import flax.nnx  # noqa: F401
    import optax  # noqa: F401

    strategy.run(step, (1.0,))
    rx.Checkpoint(model=model)
    after = attributes_of(keras)
    return {
        "cold": len(cold),
        "hot": len(hot),
        "patched": sorted(patched_attributes(before, after)),
        "hooks": sorted(hook_lists()),
        "import_hooks": sum(id(finder) not in finders for finder in sys.meta_path),
    }


def files_entered(call) -> set[str]:
    """The files of replicax whose functions are called while ``call`` runs."""
    files: set[str] = set()

    def note(frame, event, arg):
        if event == "call" and frame.f_code.co_filename.startswith(str(PRIVATE)):
            files.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return files


def attributes_of(package) -> dict[str, object]:
    """All attributes of all classes and modules of ``package``, by dotted name."""
    found: dict[str, object] = {}
    prefix = package.__name__ + "."
    for name, module in list(sys.modules.items()):
        if not name.startswith(prefix) or module is None:
            continue
        for attribute, value in list(vars(module).items()):
            if getattr(value, "__module__", None) == name and isinstance(value, type):
                found |= {f"{name}.{attribute}.{key}": member for key, member in list(vars(value).items())}
                found[f"{name}.{attribute}.__bases__"] = value.__bases__
            elif callable(value):
                found[f"{name}.{attribute}"] = value
    return {
        name: value
        for name, value in found.items()
        if not name.endswith(("__abstractmethods__", "_abc_impl"))
    }


def patched_attributes(before: dict[str, object], after: dict[str, object]) -> set[str]:
    """Attributes that have changed; ``result`` of all metrics counts as one, and so does a class among the
    bases of another."""
    changed = {name for name, value in after.items() if name in before and before[name] is not value}
    return {"metrics.result" if name.endswith(".result") else name for name in changed}


def hook_lists() -> Iterator[str]:
    """Empty lists in the source of our modules that contain callables once everything is imported."""
    for name, module in list(sys.modules.items()):
        if not name.startswith("replicax._src.") or getattr(module, "__file__", None) is None:
            continue
        for node in ast.parse(Path(module.__file__).read_text()).body:
            value = getattr(node, "value", None)
            if (
                isinstance(node, (ast.Assign, ast.AnnAssign))
                and isinstance(value, ast.List)
                and not value.elts
            ):
                target = ast.unparse(node.target if isinstance(node, ast.AnnAssign) else node.targets[0])
                if any(map(callable, getattr(module, target, []))):
                    yield f"{name.removeprefix('replicax._src.')}.{target}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--probe", action="store_true", help="print what one process sees, as JSON")
    if parser.parse_args().probe:
        print(json.dumps(probe()))
        return
    measured = gates()
    width = max(len(gate.what) for gate in measured)
    print(f"| {'what a reader feels':{width}} | now     | at most |        |")
    print(f"|{'-' * (width + 2)}|---------|---------|--------|")
    for gate in measured:
        now, most = (" / ".join(map(str, numbers)) for numbers in (gate.now, gate.most))
        print(f"| {gate.what:{width}} | {now:7} | {most:7} | {'met' if gate.is_met else 'missed':6} |")


if __name__ == "__main__":
    main()

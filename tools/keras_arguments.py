"""Writes ``keras_arguments.json``: the arguments of Keras 2 that Keras 3 does not have, or has in another place.

Run it with the wheels of Keras 2 (``keras`` 2.x, or ``tensorflow`` up to 2.5, which contains it), and with Keras 3
installed: ``python tools/keras_arguments.py tensorflow_cpu-2.3.0-….whl keras-2.9.0-….whl keras-2.15.0-….whl``. It reads
sources and imports neither version. What a difference means stands in ``keras_dropped.toml``.
"""

from __future__ import annotations

import ast
import importlib.util
import itertools
import json
import sys
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from replicax._migrate.keras_dropped import ARGUMENTS, name_in_keras_3

# Methods of these are compared, too.
CLASSES = (
    "Model",
    "Sequential",
    "layers.Layer",
    "losses.Loss",
    "metrics.Metric",
    "optimizers.Optimizer",
)


@dataclass(frozen=True)
class Accepted:
    """The arguments of a function: those by place, in order; all names; and if it takes any others."""

    places: tuple[str, ...]
    names: frozenset[str]
    has_rest: bool


@dataclass(frozen=True, eq=False)
class File:
    path: str
    tree: ast.Module


class Library:
    """The public functions and classes of one version of Keras, by name without ``keras.``."""

    def __init__(self, texts: Mapping[str, str]) -> None:
        self._classes: dict[str, list[tuple[File, ast.ClassDef]]] = {}
        self.public: dict[str, tuple[File, ast.ClassDef | ast.FunctionDef]] = {}
        for path, text in texts.items():
            file = File(path, ast.parse(text))
            for node in file.tree.body:
                if isinstance(node, ast.ClassDef):
                    self._classes.setdefault(node.name, []).append((file, node))
                if isinstance(node, ast.ClassDef | ast.FunctionDef):
                    self.public |= dict.fromkeys(_exports(node), (file, node))

    def accepted(self, name: str) -> Accepted:
        """Returns the arguments of a function, or of a class and of its bases as far as ``**kwargs`` leads."""
        file, node = self.public[name]
        if isinstance(node, ast.FunctionDef):
            return _accepted(node)
        inits = [init for _, class_ in self._lineage(file, node) for init in _methods(class_, "__init__")]
        places = _places(inits[0], is_method=True) if inits else ()
        return Accepted(places, frozenset(self._names_of(file, node)), has_rest=not inits)

    def _names_of(self, file: File, class_: ast.ClassDef, depth: int = 12) -> set[str]:
        """Returns the names that a class accepts, with those of its bases if it hands on ``**kwargs``."""
        own = next(_methods(class_, "__init__"), None)
        names = _names(own) if own else set()
        for base in class_.bases if depth and (own is None or own.args.kwarg) else ():
            found = self._base(file, class_, base)
            names |= self._names_of(*found, depth - 1) if found else set()
        return names

    def methods(self, name: str) -> Iterator[tuple[str, Accepted]]:
        """Yields the public methods of a class, with those of its bases."""
        if name not in self.public:
            return
        file, node = self.public[name]
        assert isinstance(node, ast.ClassDef)
        seen: set[str] = set()
        for _, class_ in self._lineage(file, node):
            for method in _methods(class_):
                decorators = {
                    ast.unparse(decorator).rpartition(".")[2] for decorator in method.decorator_list
                }
                is_plain = not decorators & {"property", "setter", "staticmethod", "classmethod"}
                if is_plain and not method.name.startswith("_") and method.name not in seen:
                    seen.add(method.name)
                    yield method.name, _accepted(method, is_method=True)

    def _lineage(self, file: File, class_: ast.ClassDef) -> list[tuple[File, ast.ClassDef]]:
        """Returns the class and the classes above it."""
        found = [(file, class_)]
        for below in found:
            bases = (self._base(*below, base) for base in below[1].bases)
            found += [base for base in bases if base and base not in found]
        return found

    def _base(self, file: File, class_: ast.ClassDef, base: ast.expr) -> tuple[File, ast.ClassDef] | None:
        """Returns the class that a base names: of the same file, of the module that is named, or the public one."""
        name = base.attr if isinstance(base, ast.Attribute) else base.id if isinstance(base, ast.Name) else ""
        module = base.value.id if isinstance(base, ast.Attribute) and isinstance(base.value, ast.Name) else ""
        same = [each for each in self._classes.get(name, ()) if each[1] is not class_]
        public = [value for value in self.public.values() if value in same]
        chosen = [
            *(each for each in same if each[0] is file),
            *(each for each in same if module and PurePosixPath(each[0].path).stem == module),
            *public,
            *same,
        ]
        return chosen[0] if chosen else None


def _exports(node: ast.ClassDef | ast.FunctionDef) -> Iterator[str]:
    for decorator in node.decorator_list:
        if isinstance(decorator, ast.Call) and getattr(decorator.func, "id", "") == "keras_export":
            for argument in decorator.args:
                texts = argument.elts if isinstance(argument, ast.List | ast.Tuple) else [argument]
                yield from (ast.literal_eval(text).removeprefix("keras.") for text in texts)


def _methods(class_: ast.ClassDef, name: str = "") -> Iterator[ast.FunctionDef]:
    for node in class_.body:
        if isinstance(node, ast.FunctionDef) and name in ("", node.name):
            yield node


def _accepted(function: ast.FunctionDef, *, is_method: bool = False) -> Accepted:
    places = _places(function, is_method=is_method)
    return Accepted(places, frozenset(_names(function)), has_rest=function.args.vararg is not None)


def _places(function: ast.FunctionDef, *, is_method: bool = False) -> tuple[str, ...]:
    return tuple(argument.arg for argument in function.args.args[is_method:])


def _names(function: ast.FunctionDef) -> set[str]:
    """Returns the names of the arguments, and of those that it takes from ``**kwargs``."""
    arguments = function.args
    names = {argument.arg for argument in [*arguments.args, *arguments.kwonlyargs]} - {"self", "cls"}
    rest = arguments.kwarg.arg if arguments.kwarg else None
    for node in ast.walk(function) if rest else ():
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if getattr(node.func.value, "id", "") == rest and node.func.attr in ("pop", "get") and node.args:
                names |= _texts(node.args[0])
        elif isinstance(node, ast.Compare) and getattr(node.comparators[0], "id", "") == rest:
            names |= _texts(node.left)
        elif isinstance(node, ast.Assign) and "allowed" in ast.unparse(node.targets[0]):
            names |= _texts(node.value)
        elif isinstance(node, ast.Call) and "validate_kwargs" in ast.unparse(node.func):
            names |= set().union(*map(_texts, node.args))
    return names


def _texts(node: ast.expr) -> set[str]:
    return {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def of_wheel(path: Path) -> Library:
    with zipfile.ZipFile(path) as wheel:
        names = [
            n
            for n in wheel.namelist()
            if n.endswith(".py") and n.startswith(("keras/", "tensorflow/python/keras/"))
        ]
        return Library({name: wheel.read(name).decode() for name in names if "_test" not in name})


def installed() -> Library:
    spec = importlib.util.find_spec("keras")
    assert spec is not None
    assert spec.submodule_search_locations
    root = Path(spec.submodule_search_locations[0])
    return Library(
        {str(path): path.read_text() for path in (root / "src").rglob("*.py") if "_test" not in path.name}
    )


def compared(old: list[Accepted], new: Accepted) -> dict[str, list[str]] | None:
    """Returns how a function of Keras 3 differs from its versions in Keras 2; None if it does not.

    Returns:
      The names that are gone, and the names by place before and now. Those before end where versions differ.
    """
    if new.has_rest:
        return None
    gone = sorted(set().union(*(each.names for each in old)) - new.names)
    columns = (
        {name for name in column if name} for column in itertools.zip_longest(*(each.places for each in old))
    )
    places = [name for names in itertools.takewhile(lambda names: len(names) == 1, columns) for name in names]
    is_same = all(each.places == new.places[: len(each.places)] for each in old)
    return None if is_same and not gone else {"gone": gone, "before": places, "now": list(new.places)}


def of_methods(old: list[Library], new: Library) -> Iterator[tuple[str, dict[str, list[str]]]]:
    """Yields the methods whose arguments differ, as ``.compile``, whatever their class: where all classes agree."""
    differences: dict[str, list[dict[str, list[str]] | None]] = {}
    missing: dict[str, set[str]] = {}
    for class_ in CLASSES:
        after = dict(new.methods(class_))
        before: dict[str, list[Accepted]] = {}
        for library in old:
            for method, accepted in library.methods(class_):
                before.setdefault(method, []).append(accepted)
        for method, versions in before.items():
            if method in after:
                differences.setdefault(method, []).append(compared(versions, after[method]))
            else:
                missing.setdefault(method, set()).add(class_)
    for method, found in sorted(differences.items()):
        if found[0] and all(each == found[0] for each in found):
            yield f".{method}", found[0]
        elif any(found):
            print(f"{method} differs between classes: {found}")
    for method, classes in sorted(missing.items()):
        print(f"not in Keras 3: {method} of {', '.join(sorted(classes))}")


def main() -> None:
    old, new = [of_wheel(Path(path)) for path in sys.argv[1:]], installed()
    versions: dict[str, list[Accepted]] = {}
    for library in old:
        for name in sorted(library.public):
            target = name_in_keras_3(f"tf.keras.{name}")
            if target in new.public:
                versions.setdefault(target, []).append(library.accepted(name))
    found = {name: compared(each, new.accepted(name)) for name, each in versions.items()}
    of_all_layers = found["layers.Layer"]
    assert of_all_layers is not None
    of_layers = set(of_all_layers["gone"])  # they are listed once
    for name, each in found.items():
        if each and name.startswith("layers.") and name != "layers.Layer":
            each["gone"] = [argument for argument in each["gone"] if argument not in of_layers]
    entries = {**{name: each for name, each in sorted(found.items()) if each}, **dict(of_methods(old, new))}
    entries = {name: each for name, each in entries.items() if each["gone"] or each["before"] != each["now"]}
    lines = [f"{json.dumps(name)}: {json.dumps(entry)}" for name, entry in entries.items()]
    ARGUMENTS.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(f"{len(lines)} of {len(found)} functions, classes and methods differ: {ARGUMENTS}")


if __name__ == "__main__":
    main()

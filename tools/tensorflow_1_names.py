"""Writes ``tensorflow_1.json``: the names of ``tf.compat.v1`` that are rows of the table under another name.

Run it with a Python that has TensorFlow 2.15 and libcst: ``python tools/tensorflow_1_names.py``. A name goes by a row of TensorFlow 2
if both are one object, or if the arguments of TensorFlow 1 begin with those of the row, so that a call means the same.
"""

from __future__ import annotations

import functools
import inspect
import json
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from replicax._migrate.table import TENSORFLOW_1, rows

# Other names of arguments that mean the same.
SYNONYMS = {
    "filter": "filters",
    "value": "input",
    "tensor": "input",
    "keep_dims": "keepdims",
    "labels": "logits",
}
# Functions whose results differ though their first arguments agree: tf.nn.dropout had keep_prob.
DIFFERENT = {
    "nn.dropout",
    "nn.embedding_lookup",
    "nn.embedding_lookup_sparse",
    "nn.sampled_softmax_loss",
    "nn.ctc_loss",
}
# Classes and functions of the same use, whose signatures do not show it.
ALIKE = {
    "device",
    "executing_eagerly",
    "name_scope",
    "ones_like",
    "train.Checkpoint",
    "zeros_like",
    "zeros_initializer",
    "ones_initializer",
    "constant_initializer",
    "nn.softmax_cross_entropy_with_logits",
}
SKIPPED = (
    *("keras", "compat", "v1", "v2", "layers", "losses", "metrics", "estimator", "app", "flags", "logging"),
    *("data", "gfile", "summary"),
)
MISSING = object()


def at(root: Any, path: str) -> Any:
    return functools.reduce(lambda found, name: getattr(found, name, MISSING), path.split("."), root)


def public(module: Any, path: str = "", depth: int = 3) -> Iterator[tuple[str, Any]]:
    for name in sorted(dir(module)):
        value = getattr(module, name)
        if name.startswith("_") or name in SKIPPED:
            continue
        if inspect.ismodule(value):
            is_part = value.__name__.startswith("tensorflow._api")
            yield from public(value, f"{path}{name}.", depth - 1) if depth and is_part else ()
        else:
            yield path + name, value


def arguments(function: Any) -> list[str]:
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return []
    return [SYNONYMS.get(name, name) for name in parameters if name != "name"]


def is_alike(old: list[str], new: list[str]) -> bool:
    """True if the first two arguments agree, which are those that programs give by place, or all that there are."""
    return bool(new) and old[: min(2, len(new))] == new[:2] and set(new) <= set(old)


def main() -> None:
    known: dict[int, str] = {}
    names = [name.removeprefix("tf.") for row in rows() for name in row.names if name.startswith("tf.")]
    for name in names:
        value = MISSING if name.startswith(("compat", "keras", "losses", "metrics")) else at(tf, name)
        if callable(value):
            known.setdefault(id(value), name)
    found: dict[str, str] = {}
    for name, value in public(tf.compat.v1):
        if id(value) in known:
            found[name] = known[id(value)]
        elif (
            name in ALIKE
            or (name in names and not callable(value))
            or (
                name in names
                and name not in DIFFERENT
                and is_alike(arguments(value), arguments(at(tf, name)))
            )
        ):  # such as a dtype, a number
            found[name] = name
    kept = [row.name.removeprefix("tf.") for row in rows() if row.kind == "keep"]
    found |= {name: name for name in kept if "." not in name and inspect.ismodule(at(tf.compat.v1, name))}
    lines = [f"{json.dumps(name)}: {json.dumps(target)}" for name, target in sorted(found.items())]
    TENSORFLOW_1.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    missed = [name for name in names if name not in found and at(tf.compat.v1, name) is not MISSING]
    print(f"{len(found)} names -> {TENSORFLOW_1}; with other arguments: {missed}")


if __name__ == "__main__":
    main()

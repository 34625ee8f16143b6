"""Prints the names and arguments that Keras 2 has and Keras 3 does not: the source of ``keras_dropped.toml``.

Run it with a Python that has ``tf_keras``; remove by hand what Keras 3 still accepts by ``**kwargs``.
"""

import inspect
import os
from collections.abc import Iterator

MODULES = (
    "",
    "activations",
    "applications",
    "backend",
    "callbacks",
    "constraints",
    "initializers",
    "layers",
    "losses",
    "metrics",
    "models",
    "optimizers",
    "optimizers.schedules",
    "preprocessing.image",
    "preprocessing.sequence",
    "regularizers",
    "saving",
    "utils",
)
CLASSES = ("Model", "layers.Layer", "optimizers.Optimizer", "metrics.Metric")


def at(root: object, path: str) -> object:
    for part in filter(None, path.split(".")):
        root = getattr(root, part)
    return root


def pairs(old: object, new: object) -> Iterator[tuple[str, object, object]]:
    """Yields the public names of Keras 2 and the objects of both versions; None if Keras 3 has none."""
    for module in MODULES:
        for name in dir(at(old, module)):
            value = getattr(at(old, module), name)
            if not name.startswith("_") and not inspect.ismodule(value):
                yield f"{module}.{name}".strip("."), value, getattr(at(new, module), name, None)
    for class_ in CLASSES:
        for name in dir(at(old, class_)):
            if not name.startswith("_"):
                yield f"{class_}.{name}", getattr(at(old, class_), name), getattr(at(new, class_), name, None)


def dropped(old: object, new: object) -> list[str]:
    """The named arguments that the newer function lacks."""
    try:
        before, after = inspect.signature(old).parameters, inspect.signature(new).parameters
    except (TypeError, ValueError):
        return []
    named = (p for p in before.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))
    return [parameter.name for parameter in named if parameter.name not in after]


def main() -> None:
    os.environ["KERAS_BACKEND"] = "jax"
    import keras
    import tf_keras

    for path, old, new in pairs(tf_keras, keras):
        if new is None:
            print(path)
        elif arguments := dropped(old, new):
            print(path, arguments)


if __name__ == "__main__":
    main()

"""Adds to the error of an ``import keras`` that fails which backend Keras has selected, and what to write.

Keras imports its backend. Without ``KERAS_BACKEND`` that is TensorFlow, and the error names only the missing package.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, final


@final
class _Finder(MetaPathFinder):
    """Finds Keras as Python does, once."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != "keras":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("keras")
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self)
        return spec


@final
class _Loader(Loader):
    """Loads Keras as its own loader does, and adds a note to an ImportError."""

    def __init__(self, loader: Any, finder: _Finder):
        self._loader, self._finder = loader, finder

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        from replicax._src.keras.backend import chosen_backend, wrong_backend  # only with Keras

        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        backend = chosen_backend(os.environ)  # now, because Keras writes its default to its file
        try:
            self._loader.exec_module(module)
        except ImportError as error:
            if not backend.is_jax:
                error.add_note(str(wrong_backend(backend)))
            sys.meta_path.insert(0, self._finder)  # a notebook may try again
            raise


def explain_failing_import() -> None:
    """Adds the note to each later ``import keras`` that fails. Importing Keras is otherwise unchanged."""
    if "keras" not in sys.modules:
        sys.meta_path.insert(0, _Finder())

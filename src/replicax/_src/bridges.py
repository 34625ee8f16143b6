"""Bridges to frameworks: each is loaded when the user has imported its framework, never before."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any, Final

from replicax._src.keras_backend import chosen_backend, wrong_backend

_BRIDGES: Final = {"keras": "replicax._src.keras.bridge", "flax.nnx": "replicax._src.nnx"}
_installed: set[str] = set()


def ensure_bridges() -> None:
    """Installs the bridges of the frameworks that have been imported by now, and of others as soon as they are.

    Cheap; call it often.
    """
    for framework, bridge in _BRIDGES.items():
        if framework not in _installed and sys.modules.get(framework) is not None:
            importlib.import_module(bridge).install()
            _installed.add(framework)
    if len(_installed) < len(_BRIDGES) and _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)


class _Finder(importlib.abc.MetaPathFinder):
    """Sees a framework being imported: in a scope, say, where a model is made right afterwards."""

    def __init__(self) -> None:
        self._is_asking = False

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname not in _BRIDGES or fullname in _installed or self._is_asking:
            return None
        self._is_asking = True
        try:
            spec = importlib.util.find_spec(fullname)  # what the others find
        finally:
            self._is_asking = False
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a framework as its own loader does, then its bridge."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: Any) -> Any:
        return self._loader.create_module(spec)

    def exec_module(self, module: Any) -> None:
        module.__spec__.loader = module.__loader__ = self._loader  # nobody sees that we were here
        try:
            self._loader.exec_module(module)
        except ModuleNotFoundError as error:
            if module.__name__ == "keras" and not (backend := chosen_backend(os.environ)).is_jax:
                error.add_note(
                    str(wrong_backend(backend))
                )  # the same error: others may catch it, who can do without Keras
            raise
        ensure_bridges()


_finder: Final = _Finder()

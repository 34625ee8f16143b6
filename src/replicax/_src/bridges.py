"""Bridges to frameworks: each is loaded when the user has imported its framework, never before."""

from __future__ import annotations

import importlib
import sys

_BRIDGES = {"keras": "replicax._src.keras.bridge", "flax.nnx": "replicax._src.nnx"}
_installed: set[str] = set()


def ensure_bridges() -> None:
    """Installs the bridges of the frameworks that have been imported by now. Cheap; call it often."""
    for framework, bridge in _BRIDGES.items():
        if framework not in _installed and framework in sys.modules:
            importlib.import_module(bridge).install()
            _installed.add(framework)

"""Loads what a higher layer or a part provides, by the names in the registry (``parts.py``)."""

from __future__ import annotations

import functools
import importlib
import types

from replicax._src.packaging.home import install_command
from replicax._src.parts import HOOKS
from replicax._src.vocabulary.errors import MissingPartError


@functools.cache
def hook(name: str) -> types.ModuleType:
    """Returns the module that provides a hook, importing it at the first call.

    Raises:
      MissingPartError: The checkout lacks the part that provides it.
    """
    return load(HOOKS[name])


def load(module: str) -> types.ModuleType:
    """Imports a private module by its name, and says what is missing.

    Raises:
      MissingPartError: The checkout lacks the part that provides it.
      ModuleNotFoundError: A package that replicax needs is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if missing in ("jax", "jaxlib", "numpy"):
            error.add_note(
                f"replicax needs {missing}, which is not installed. Run: {install_command('jax')} (for NVIDIA GPUs: "
                f"{install_command('jax[cuda13]')}; for TPUs: {install_command('jax[tpu]')})."
            )
        elif f"{module}.".startswith(f"{missing}.") and missing.startswith("replicax."):
            # The module or a folder above it is missing, not something that it imports.
            raise MissingPartError(
                f"{module} is not there: this checkout of replicax lacks src/{missing.replace('.', '/')}. Restore it, or "
                "install all of replicax."
            ) from None
        raise

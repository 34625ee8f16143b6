"""The backend that Keras has, or would have if it were imported now, and what to write if that is not JAX.

The module does not import Keras.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, final

from replicax._src.packaging.extras import EXTRAS, missing_extra
from replicax._src.untrusted.strict_json import read_json
from replicax._src.vocabulary.errors import KerasBackendError

VARIABLE: Final = "KERAS_BACKEND"
LINE: Final = 'import os; os.environ["KERAS_BACKEND"] = "jax"'
ADVICE: Final = (
    f"Write {LINE} above the first import of keras (or of tensorflow, which imports keras), or set KERAS_BACKEND=jax in "
    "the environment before Python starts."
)


@final
@dataclass(frozen=True)
class KerasBackend:
    """A backend of Keras, and what selected it.

    Attributes:
      name: ``"jax"``, ``"tensorflow"``.
      source: What selected it, in words.
      is_imported: True if Keras has been imported with it.
    """

    name: str
    source: str
    is_imported: bool = False

    @property
    def is_jax(self) -> bool:
        return self.name == "jax"


def chosen_backend(environ: Mapping[str, str]) -> KerasBackend:
    """Returns the backend that Keras selects when it is imported in this environment, by Keras's own rules.

    Source: keras/src/backend/config.py.
    """
    if environ.get(VARIABLE):
        return KerasBackend(environ[VARIABLE], f"{VARIABLE}={environ[VARIABLE]}")
    path = _config_path(environ)
    try:
        named = read_json(path.read_text()).get("backend")
    except (OSError, ValueError, AttributeError):
        named = None
    if named:
        return KerasBackend(str(named), f"{VARIABLE} is not set, and {path} names it")
    return KerasBackend("tensorflow", f"{VARIABLE} is not set, and it is Keras's default")


def backend_now() -> KerasBackend:
    """Returns the backend of the imported Keras; before the import, the backend that it would select."""
    told = getattr(sys.modules.get("keras.src.backend.config"), "backend", None)
    chosen = chosen_backend(os.environ)
    if told is None:  # not imported, or not yet to its end
        return chosen
    name = told()
    return KerasBackend(
        name, chosen.source if chosen.name == name else "chosen when Keras was imported", is_imported=True
    )


def check_keras(what: str) -> None:
    """Checks that Keras is installed and runs, or will run, on JAX. Call it before importing Keras.

    Args:
      what: The feature that needs Keras.

    Raises:
      MissingExtraError: It is not installed.
      KerasBackendError: It runs, or would run, on another backend.
    """
    (package,) = EXTRAS["keras"]
    if not package.is_installed:
        raise missing_extra(what, "keras")
    backend = backend_now()
    if not backend.is_jax:
        raise wrong_backend(backend, what)


def wrong_backend(backend: KerasBackend, what: str = "replicax") -> KerasBackendError:
    """Returns the error for a backend that is not JAX."""
    runs = "runs" if backend.is_imported else "would run"
    return KerasBackendError(
        f"Keras {runs} on the {backend.name!r} backend ({backend.source}), and {what} needs 'jax'. {ADVICE}"
    )


def _config_path(environ: Mapping[str, str]) -> Path:
    if "KERAS_HOME" in environ:
        return Path(os.path.expanduser(environ["KERAS_HOME"])) / "keras.json"
    home = os.path.expanduser("~")
    return Path(home if os.access(home, os.W_OK) else "/tmp") / ".keras" / "keras.json"

"""The optional dependencies: which packages each extra installs, and the error when one of them is missing. Pure."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, final

from replicax._src.packaging.home import install_command
from replicax._src.vocabulary.errors import MissingExtraError


@final
@dataclass(frozen=True)
class Package:
    """A package that an extra installs.

    Attributes:
      name: The name for pip.
      module: The module that the package provides; the same name by default.
      like_jax: True if it must have the version of JAX.
      features: The parts of the package to install, such as ``[train]``.
    """

    name: str
    module: str = ""
    like_jax: bool = False
    features: str = ""

    @property
    def is_installed(self) -> bool:
        """Looks for the module without importing it; parents of a dotted name are imported."""
        try:
            return importlib.util.find_spec(self.module or self.name) is not None
        except ModuleNotFoundError:
            return False
        except ValueError:  # a module that somebody has made by hand has no spec
            return (self.module or self.name) in sys.modules

    @property
    def version(self) -> str | None:
        """The installed version; None if pip knows none."""
        try:
            return importlib.metadata.version(self.name)
        except importlib.metadata.PackageNotFoundError:
            return None

    @property
    def to_install(self) -> str:
        """The argument for ``pip install``."""
        jax = Package("jax").version if self.like_jax else None
        return self.name + self.features if jax is None else f"{self.name}=={jax}"


# As in pyproject.toml; tests/test_package.py compares them.
EXTRAS: Final = {
    "keras": (Package("keras"),),
    "optax": (Package("optax"),),
    "flax": (Package("flax"),),
    "grain": (Package("grain"),),
    "files": (Package("grain"), Package("pyarrow")),
    "checkpoint": (Package("tensorstore"), Package("safetensors")),
    "orbax": (Package("orbax-checkpoint", "orbax.checkpoint"),),
    "summaries": (Package("tensorboardX"), Package("pillow", "PIL")),
    "cli": (Package("rich"),),
    "ps": (Package("xxhash"), Package("cloudpickle"), Package("flatbuffers")),
    "migrate": (Package("libcst"),),
    "plan-tpu": (Package("libtpu"),),
    "plan-gpu": (Package("jax-cuda12-plugin", "jax_plugins.xla_cuda12", like_jax=True),),
    "ray": (Package("ray", features="[train]"),),
    "k8s": (Package("kubernetes"),),
    "gce": (Package("google-api-python-client", "googleapiclient"), Package("google-auth", "google.auth")),
}


def missing_packages(extra: str) -> tuple[Package, ...]:
    """Returns the packages of an extra that are not installed."""
    return tuple(package for package in EXTRAS[extra] if not package.is_installed)


def install_packages(packages: Iterable[Package]) -> str:
    """Returns the command that installs packages, which works wherever replicax itself came from."""
    return install_command(*(package.to_install for package in packages))


def missing_extra(what: str, extra: str, *names: str, advice: str = "") -> MissingExtraError:
    """Returns the error for a feature that needs packages of an extra.

    Args:
      what: The feature, as the subject of the sentence.
      extra: One of ``EXTRAS``.
      names: The packages that it needs, as pip knows them; all of the extra by default.
      advice: A sentence about what works without them.

    >>> print(missing_extra("rx.optax", "optax"))  # doctest: +SKIP
    rx.optax needs optax, which is not installed. Run: pip install optax (the extra optax).
    """
    needed = [package for package in EXTRAS[extra] if not names or package.name in names]
    missing = [package for package in needed if not package.is_installed]
    shown = missing or needed  # an installed one may be damaged
    *others, last = [package.name for package in shown]
    listed = f"{', '.join(others)} and {last}" if others else last
    why = ("are" if others else "is") + " not installed" if missing else "cannot be imported"
    command = install_packages(shown)
    text = f"{what} needs {listed}, which {why}. Run: {command} (the extra {extra}). {advice}"
    return MissingExtraError(text.rstrip())

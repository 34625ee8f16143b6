"""The versions that all tasks of a cluster must share, because compiled programs depend on them."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence

from replicax._src.cluster.failures import ClusterStartError
from replicax._src.jax_internals import jax_compat


def versions() -> dict[str, str]:
    """Returns the versions of this process, by name."""
    return {"jax": jax_compat.VERSION, "python": ".".join(map(str, sys.version_info[:2]))}


def check_versions(found: Sequence[tuple[str, Mapping[str, str]]]) -> None:
    """Checks that all tasks have the versions of the first one.

    Args:
      found: The name of each task, and its ``versions()``.

    Raises:
      ClusterStartError: They differ.
    """
    first, expected = found[0]
    for name, theirs in found:
        if theirs != expected:
            raise ClusterStartError(
                f"{first} has {_listed(expected)}, and {name} has {_listed(theirs)}: their compiled programs would differ. "
                "Install the same versions on all machines."
            )


def _listed(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())

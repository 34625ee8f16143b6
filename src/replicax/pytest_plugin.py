"""pytest fixtures for tests with several processes: write ``pytest_plugins = ["replicax.pytest_plugin"]``.

Needs pytest.
"""

from typing import Any

from replicax._src.hooks import hook
from replicax._src.parts import HOOKS

pytest_plugins = [
    HOOKS["pytest_fixtures"]
]  # pytest collects only what a module defines, so this names that module


def __getattr__(name: str) -> Any:  # for those who import the fixture, and for the page that lists it
    if name != "local_cluster":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return hook("pytest_fixtures").local_cluster

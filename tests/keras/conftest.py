"""Lets the tests here import ``fit_models`` and ``fit_feeds``, which lie beside them; what such tests share."""

import sys
from pathlib import Path

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

sys.path.insert(0, str(Path(__file__).parent))

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


@pytest.fixture(scope="module")
def compiled_once(tmp_path_factory):
    """Programs that are the same are compiled once in a file of tests: nearly all its time would go there."""
    options = {**CACHE, "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs"))}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

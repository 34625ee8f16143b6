"""Setup that every test needs: Keras on JAX, eight virtual devices, and the module ``checks``."""

import gc
import os
import runpy
import signal
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

sys.path.insert(0, str(Path(__file__).parent))
QUICK_START = Path(__file__).with_name("quick_start")
runpy.run_path(str(QUICK_START / "sitecustomize.py"))

import hypothesis
import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from replicax import config

# For processes that tests start, too.
FOLDERS = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(QUICK_START), *FOLDERS]))

config.set_local_devices(8)

# Compilation times depend on the load of the machine, and tests read the output of programs.
os.environ["REPLICAX_PROGRESS"] = "0"

# Processes that tests start find compiled Python files; otherwise each would compile three hundred, for half a second.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# In a shell's background Ctrl-C is ignored, and under nohup SIGHUP is: all processes that tests start would ignore
# them too.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

# A busy machine is no reason to fail, and new examples are not either: the profile "search" looks for new ones.
IN_HASTE = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("replicax", derandomize=True, **IN_HASTE)
hypothesis.settings.register_profile("search", **IN_HASTE)
hypothesis.settings.load_profile("replicax")

CACHE = {
    "jax_persistent_cache_min_compile_time_secs": 0,
    "jax_persistent_cache_min_entry_size_bytes": -1,
}


def pytest_configure(config):
    import checks

    checks.runs_long = "not long" not in config.getoption("markexpr")
    if not checks.runs_long:
        # As `make test` calls it. XLA reads it at its first compilation; processes that tests start have it too.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {checks.xla_flags()}".strip()


def pytest_collection_finish(session):
    # A million objects of JAX, Keras and pytest stay alive: otherwise the garbage collector visits them, for a third
    # of a second.
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Equal programs are compiled once in a process of tests, which saves a sixth of the time."""
    options = {**CACHE, "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("programs"))}
    before = {name: getattr(jax.config, name) for name in options}
    for name, value in options.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()

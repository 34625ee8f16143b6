"""Setup that every test needs: Keras on JAX, eight virtual devices, and the module ``checks``."""

import gc
import importlib.util
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

from replicax import config
from replicax._src.cluster import machine_layout
from replicax._src.devices.program_cache import keep_programs

# Fixtures for tests of several processes. The tree of `make test-core` lacks the part that has them.
pytest_plugins = ["replicax.pytest_plugin"] if importlib.util.find_spec("replicax._testing") else []

# For processes that tests start, too.
FOLDERS = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys([str(QUICK_START), *FOLDERS]))

config.set_local_devices(8)

# Compiled programs are kept for the next run, in files of the user alone. REPLICAX_CACHE_DIR=off: for this run only.
os.environ.setdefault("REPLICAX_CACHE_DIR", str(Path(__file__).parents[1] / "build" / "programs"))
os.environ.setdefault("REPLICAX_CACHE_MAX_BYTES", str(10**9))

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


# A cluster binds its ports some seconds after they were found free. Processes of pytest-xdist take different ones.
OF_PROCESS = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])
NUM_PROCESSES = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
all_ports = machine_layout._static_ports


def own_ports():
    return [port for port in all_ports() if port == 0 or port % NUM_PROCESSES == OF_PROCESS % NUM_PROCESSES]


machine_layout._static_ports = own_ports


def pytest_configure(config):
    import checks

    checks.runs_long = "not long" not in config.getoption("markexpr")
    if not checks.runs_long:
        # As `make test` calls it. XLA reads it at its first compilation; processes that tests start have it too. Each
        # flag once, also in pytest-xdist's workers, which inherit it: the keys of compiled programs have the text.
        flags = f"{os.environ.get('XLA_FLAGS', '')} {checks.xla_flags()}".split()
        os.environ["XLA_FLAGS"] = " ".join(dict.fromkeys(flags))


def pytest_collection_finish(session):
    # A million objects of JAX, Keras and pytest stay alive: otherwise the garbage collector visits them, for a third
    # of a second. Traces and compiled programs are some hundred thousand more: with Python's thresholds, a fourteenth
    # of the processor time goes to visiting them. A test that needs a collection calls gc.collect().
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 100)


@pytest.fixture(scope="module", autouse=True)
def old_objects_are_frozen():
    """Freezes what outlives a file's tests, above all programs: ``gc.collect()`` in a later file takes milliseconds
    then, and not a second.
    """
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def compiled_once(tmp_path_factory):
    """Equal programs are compiled once: by all processes of tests, and those that tests start, until the next change of
    JAX, of XLA's flags or of the machine, which the folder and JAX's keys name. Without a folder, once in each process.
    """
    keep_programs(is_task=False)
    if jax.config.jax_compilation_cache_dir is None:  # switched off, or others may write there
        os.environ["REPLICAX_CACHE_DIR"] = "off"
        jax.config.update("jax_compilation_cache_dir", str(tmp_path_factory.mktemp("programs")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)

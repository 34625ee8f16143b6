"""Tests on the engines that start jobs: Slurm, Ray, Open MPI; and on schemas of Kubernetes. ``make test-engines`` runs them."""

import os
import pathlib

import pytest

# They take minutes, and need what `make test-engines` installs: no other selection of tests finds them.
if not os.environ.get("REPLICAX_TEST_ENGINES"):
    collect_ignore = [path.name for path in pathlib.Path(__file__).parent.glob("test_*.py")]


@pytest.fixture(scope="session", autouse=True)
def jobs_compile_once(tmp_path_factory):
    """Jobs find the programs that earlier ones compiled, which saves a third of their processor time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("REPLICAX_CACHE_DIR", str(tmp_path_factory.mktemp("programs_of_jobs")))
        yield

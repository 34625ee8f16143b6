"""Tests on the engines that start jobs: Slurm, Ray, Open MPI; and on schemas of Kubernetes. ``make test-engines`` runs them."""

import os
import pathlib

# They take minutes, and need what `make test-engines` installs: no other selection of tests finds them.
if not os.environ.get("REPLICAX_TEST_ENGINES"):
    collect_ignore = [path.name for path in pathlib.Path(__file__).parent.glob("test_*.py")]

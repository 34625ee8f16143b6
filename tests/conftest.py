"""What every test needs before anything starts: Keras on JAX, eight virtual devices, and the module ``checks``."""

import os
import sys
from pathlib import Path

os.environ["KERAS_BACKEND"] = "jax"

import hypothesis

from replicax import config

sys.path.insert(0, str(Path(__file__).parent))

config.set_local_devices(8)

# A machine that is busy with something else is no reason to fail.
hypothesis.settings.register_profile("replicax", deadline=None)
hypothesis.settings.load_profile("replicax")

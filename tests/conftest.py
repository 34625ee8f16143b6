"""What every test needs before anything starts: Keras on JAX, and eight virtual devices."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import hypothesis

from replicax import config

config.set_local_devices(8)

# A machine that is busy with something else is no reason to fail.
hypothesis.settings.register_profile("replicax", deadline=None)
hypothesis.settings.load_profile("replicax")

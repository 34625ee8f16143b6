"""Small programs written once and run twice: by TensorFlow (``record.py``) and by replicax (the tests).

A program sees only a ``Side`` (``side.py``), so both execute the same source. No framework is imported here.
"""

from parity_cases import (
    assigning,
    collectives,
    contexts,
    feeding,
    looping,
    losses,
    reducing,
    replicas,
    saving,
    scattering,
    sharding,
    tape,
    training,
)
from parity_cases.registry import CASES

__all__ = [
    "CASES",
    "assigning",
    "collectives",
    "contexts",
    "feeding",
    "looping",
    "losses",
    "reducing",
    "replicas",
    "saving",
    "scattering",
    "sharding",
    "tape",
    "training",
]

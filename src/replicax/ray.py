"""Trainings on Ray: ``rx.ray``. Ray is imported when one of the names is asked for."""

# Its names stand in _src/parts.py; type checkers read the .pyi.
from replicax._src.user.public_names import publish_all

__dir__ = publish_all(globals())

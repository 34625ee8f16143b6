"""Checks of your own programs, for tests and notebooks, and clusters of real processes to test them in:
``rx.testing``.
"""

# Its names stand in _src/parts.py; type checkers read the .pyi.
from replicax._src.user.public_names import publish_all

__dir__ = publish_all(globals())

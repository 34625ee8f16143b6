"""The result of ``strategy.plan``: ``rx.planning``."""

from replicax._src.devices.plan import Bound, Memory, Plan, PlannedArray
from replicax._src.user.public_names import publish_all

__all__ = ["Bound", "Memory", "Plan", "PlannedArray"]

__dir__ = publish_all(globals())

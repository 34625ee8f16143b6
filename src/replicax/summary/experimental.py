"""The step of summaries that name none: ``rx.summary.experimental``."""

from replicax._src.summaries.current import get_step, set_step
from replicax._src.user.public_names import publish_all

__all__ = ["get_step", "set_step"]

__dir__ = publish_all(globals())

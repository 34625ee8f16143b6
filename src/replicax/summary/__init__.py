"""What TensorBoard shows, with the names of ``tf.summary``: ``rx.summary``."""

from replicax._src.summaries.current import record_if, should_record_summaries
from replicax._src.summaries.functions import create_file_writer, flush, histogram, image, scalar, text
from replicax._src.summaries.writer import SummaryWriter
from replicax._src.user.public_names import publish_all
from replicax.summary import experimental

__all__ = [
    "SummaryWriter",
    "create_file_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
]

__dir__ = publish_all(globals())

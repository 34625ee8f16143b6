"""Authenticated connections between two tasks, which carry frames, and memory to receive into.

`_ps/transport` makes messages of them.
"""

from __future__ import annotations

from replicax._src.cluster.endpoint import Endpoint
from replicax._src.wire.buffers import ALIGNMENT, Buffers, aligned, aligned_empty
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, PeerEndedError
from replicax._src.wire.frames import LARGEST_BODY

__all__ = [
    "ALIGNMENT",
    "LARGEST_BODY",
    "Buffers",
    "Connection",
    "Endpoint",
    "ForeignPeerError",
    "PeerEndedError",
    "aligned",
    "aligned_empty",
]

"""Errors that end a connection. Callers translate them into public ones, which name the task."""

from __future__ import annotations


class WireError(OSError):
    """The connection is unusable."""


class PeerEndedError(WireError):
    """The peer has ended the connection.

    Attributes:
      reason: The peer's reason; empty if it sent none.
      is_refusal: True if the peer refuses the data that it got, so that sending it again is useless.
    """

    def __init__(self, reason: str = "", *, is_refusal: bool = False):
        super().__init__(reason or "the peer has ended the connection")
        self.reason = reason
        self.is_refusal = is_refusal


class DamagedFrameError(WireError):
    """A frame was damaged in transit: its checksum is wrong."""


class ForeignPeerError(WireError):
    """The peer's data is not a frame: the peer is another program, or another version of replicax."""


class OtherProgramError(ForeignPeerError):
    """The peer's first bytes are not those of replicax. They may be damaged: another attempt may succeed."""


class TokenError(WireError):
    """One of the two ends does not know the token of the other one."""

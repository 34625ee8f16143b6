"""What ends a connection. Callers translate these errors into public ones, which name the task."""

from __future__ import annotations


class WireError(OSError):
    """The connection is of no more use."""


class PeerEndedError(WireError):
    """The peer has ended the connection.

    Attributes:
      reason: What the peer said about it; empty if it said nothing.
      is_refusal: True if the peer refuses what it was sent, so that sending it again does not help.
    """

    def __init__(self, reason: str = "", *, is_refusal: bool = False):
        super().__init__(reason or "the peer has ended the connection")
        self.reason = reason
        self.is_refusal = is_refusal


class DamagedFrameError(WireError):
    """A frame changed on its way: its checksum is wrong."""


class ForeignPeerError(WireError):
    """What came is no frame: another program, or another version of replicax, is at the other end."""


class OtherProgramError(ForeignPeerError):
    """What came before the handshake is none of replicax. It may be damage too: another attempt may succeed."""


class TokenError(WireError):
    """One of the two ends does not know the token of the other one."""

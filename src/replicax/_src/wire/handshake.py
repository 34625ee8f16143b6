"""The handshake before the first frame: both ends send their protocol version, and prove that they know the token.

    both     hello    "RPLX", protocol, flags, 16 zeros, 32 random bytes, checksum                      60 bytes
    client   proof    HMAC-SHA256(token, "client" + both hellos), checksum                              36 bytes
    server   proof    HMAC-SHA256(token, "server" + both hellos), checksum; or why it refuses

The token is never sent. The server proves that it knows the token only after the client has, so an unauthenticated
client learns nothing. An attacker who poses as a server, or reads the network, sees a proof and can test short
tokens against it, so a token must be random. All sizes are fixed, so at most 96 bytes of an unauthenticated peer
are read. A TLS handshake comes before these bytes; ``streams.py`` limits it to 4 KB, or 16 KB with client
certificates. The checksums distinguish damage from a wrong token.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import struct
import zlib
from typing import Final

from replicax._src.wire.errors import (
    DamagedFrameError,
    ForeignPeerError,
    OtherProgramError,
    PeerEndedError,
    TokenError,
)
from replicax._src.wire.streams import Stream

PROTOCOL: Final = 3

_MAGIC: Final = b"RPLX"
_HELLO: Final = struct.Struct("<4sHH16x32s")
_SUM: Final = struct.Struct("<I")
_HELLO_BYTES: Final = _HELLO.size + _SUM.size
_PROOF_BYTES: Final = 32 + _SUM.size
_WANTS_CHECKSUMS: Final = 1
_NO_TOKEN, _WRONG_TOKEN = b"it was shown no token".ljust(32), b"it was shown a wrong token".ljust(32)
_REFUSALS: Final = {text: text.decode().rstrip() for text in (_NO_TOKEN, _WRONG_TOKEN)}


def greet_server(stream: Stream, token: bytes, deadline: float, *, wants_checksums: bool) -> bool:
    """Does the client's part. Returns True if bodies have checksums, which they have if one of the two ends wants
    them.

    Args:
      stream: The connection.
      token: The token; empty if there is none.
      deadline: The deadline on the clock of ``time.monotonic``.
      wants_checksums: True if this end wants checksums.

    Raises:
      TokenError: The server refuses the token, or does not know it.
      ForeignPeerError: Another program answers, or another version of replicax.
      DamagedFrameError: The data was damaged in transit.
      TimeoutError: The server did not answer in time.
      OSError: The connection has ended.
    """
    ours = _hello(wants_checksums)
    stream.write([ours], deadline)
    theirs = _received(stream, _HELLO_BYTES, deadline, _MAGIC)
    is_checked = _parsed(theirs)
    stream.write([_summed(_proof(token, b"client", ours, theirs))], deadline)
    shown = _checked(_received(stream, _PROOF_BYTES, deadline))
    if shown in _REFUSALS:
        raise TokenError(_REFUSALS[shown])
    if not hmac.compare_digest(shown, _proof(token, b"server", ours, theirs)):
        raise TokenError("it does not know the token of this process")
    return wants_checksums or is_checked


def greet_client(stream: Stream, token: bytes, deadline: float, *, wants_checksums: bool) -> bool:
    """Does the server's part. The arguments and the result are those of ``greet_server``.

    Raises:
      TokenError: The client does not know the token.
      ForeignPeerError: The client is another program, or another version of replicax.
      DamagedFrameError: The data was damaged in transit.
      TimeoutError: The client did not send enough in time.
      OSError: The connection has ended.
    """
    theirs = _received(stream, _HELLO_BYTES, deadline, _MAGIC)
    ours = _hello(wants_checksums)
    stream.write([ours], deadline)  # also to another version, which reports the mismatch to its user
    is_checked = _parsed(theirs)
    shown = _checked(_received(stream, _PROOF_BYTES, deadline))
    if not hmac.compare_digest(shown, _proof(token, b"client", theirs, ours)):
        has_none = hmac.compare_digest(shown, _proof(b"", b"client", theirs, ours))
        stream.write([_summed(_NO_TOKEN if has_none else _WRONG_TOKEN)], deadline)
        raise TokenError("the client does not know the token")
    stream.write([_summed(_proof(token, b"server", theirs, ours))], deadline)
    return wants_checksums or is_checked


def _hello(wants_checksums: bool) -> bytes:
    flags = _WANTS_CHECKSUMS if wants_checksums else 0
    return _summed(_HELLO.pack(_MAGIC, PROTOCOL, flags, secrets.token_bytes(32)))


def _parsed(hello: bytes) -> bool:
    _, protocol, flags, _ = _HELLO.unpack_from(hello)
    _checked(hello)
    if protocol != PROTOCOL:
        raise ForeignPeerError(
            f"it uses version {protocol} of the protocol, and this process version {PROTOCOL}. Install the "
            "same version of replicax for all tasks"
        )
    return bool(flags & _WANTS_CHECKSUMS)


def _proof(token: bytes, who: bytes, hello_of_client: bytes, hello_of_server: bytes) -> bytes:
    return hmac.digest(token, who + hello_of_client + hello_of_server, hashlib.sha256)


def _summed(data: bytes) -> bytes:
    return data + _SUM.pack(zlib.crc32(data))


def _checked(data: bytes) -> bytes:
    content, (total,) = data[: -_SUM.size], _SUM.unpack(data[-_SUM.size :])
    if zlib.crc32(content) != total:
        raise DamagedFrameError("the handshake was damaged in transit")
    return content


def _received(stream: Stream, size: int, deadline: float, start: bytes = b"") -> bytes:
    """Receives ``size`` bytes. Raises at once if they do not begin with ``start``, as another program sent them."""
    data, at = bytearray(size), 0
    while at < size:
        part = stream.read(memoryview(data)[at:], deadline, fill=False)
        if not part:
            raise PeerEndedError
        at += part
        if data[: min(at, len(start))] != start[:at]:
            raise OtherProgramError("another program answers")
    return bytes(data)

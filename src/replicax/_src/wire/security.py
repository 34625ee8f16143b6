"""The token and TLS settings by which a process authenticates its peers and itself."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from typing import Final, final

CHECKSUMS_VARIABLE: Final = "REPLICAX_CHECKSUMS"


@final
@dataclass(frozen=True)
class Security:
    """The token, and the TLS settings.

    Attributes:
      token: The token; empty if there is none.
      client, server: The TLS settings of each role; None for connections without encryption.
      always_checks: True if bodies have checksums on loopback and under TLS too.
    """

    token: bytes = b""
    client: ssl.SSLContext | None = None
    server: ssl.SSLContext | None = None
    always_checks: bool = False

    def wants_checksums(self, *, is_loopback: bool, uses_tls: bool) -> bool:
        """True if bodies need a checksum: loopback does not damage data, and TLS has checksums of its own."""
        return self.always_checks or not (is_loopback or uses_tls)

"""The access rule of the status page: programs of this machine see it, others need a read-only token. Pure."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, final

from replicax._src.cluster.credentials import TOKEN_VARIABLE, is_loopback
from replicax._src.cluster.spec import split_address
from replicax._src.vocabulary.errors import InvalidArgumentError, ReplicaxError

_PURPOSE: Final = b"replicax status"


def viewing_token(token: str) -> str:
    """Returns the read-only token for the status, derived from the cluster's token, which is never sent for this."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()


@final
class StatusAccess:
    """The access rule of one server.

    Args:
      address: The address at which it listens.
      token: The cluster's token; None if it has none.

    Raises:
      InvalidArgumentError: Other machines can reach the address, and there is no token.
    """

    def __init__(self, address: str, token: str | None):
        host, _ = split_address(address)
        self.is_local = is_loopback(host)
        self.token = None if token is None else viewing_token(token)
        if not self.is_local and token is None:
            raise InvalidArgumentError(
                f"Any machine that can reach {address} could read the status there. Set {TOKEN_VARIABLE} to a "
                "secret, or use an address of this machine only, such as 127.0.0.1:8080, and a tunnel to it."
            )

    def admits(self, peer: str, host: str | None, shown: str | None) -> bool:
        """True if a peer may see the status.

        Args:
          peer: The address that the request comes from.
          host: The request's Host header. A page of another site in a browser of this machine can have its name
            resolved to
            this machine; the header then has that site's name.
          shown: The token in the request.
        """
        if is_loopback(peer) and _is_for_this_machine(host):
            return True
        return self.token is not None and hmac.compare_digest((shown or "").encode(), self.token.encode())


def _is_for_this_machine(host: str | None) -> bool:
    if host is None:  # no browser
        return True
    try:
        return is_loopback(split_address(host if ":" in host.rpartition("]")[2] else f"{host}:80")[0])
    except ReplicaxError:
        return False

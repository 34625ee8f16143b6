"""The pure rule for the status page: programs of this machine see it, others with a token that allows no more."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, final

from replicax._src.cluster.credentials import TOKEN_VARIABLE, is_loopback
from replicax._src.cluster.spec import split_address
from replicax._src.errors import InvalidArgumentError, ReplicaxError

_PURPOSE: Final = b"replicax status"


def viewing_token(token: str) -> str:
    """The token that lets see, made of the cluster's, which lets do everything and is never sent for this."""
    return hmac.new(token.encode(), _PURPOSE, hashlib.sha256).hexdigest()


@final
class StatusAccess:
    """The rule of one server.

    Args:
      address: Where it listens.
      token: The cluster's, if it has one.

    Raises:
      InvalidArgumentError: Other machines reach the address, and there is no token.
    """

    def __init__(self, address: str, token: str | None):
        host, _ = split_address(address)
        self.is_local = is_loopback(host)
        self.token = None if token is None else viewing_token(token)
        if not self.is_local and token is None:
            raise InvalidArgumentError(
                f"The status at {address} would be open to everybody who reaches this machine. Set {TOKEN_VARIABLE} to a "
                f"secret, or use an address of this machine only, such as 127.0.0.1:8080, and a tunnel to it."
            )

    def admits(self, peer: str, host: str | None, shown: str | None) -> bool:
        """True if a peer may see the status.

        Args:
          peer: The address that the request comes from.
          host: Whom it is for, as it says. A page of another site that a browser of this machine shows can have its
            name resolved to this machine: then the name is that site's.
          shown: The token that it shows.
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

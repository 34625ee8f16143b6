"""``Endpoint``: the address of a task, at which it listens and to which other tasks connect, with their credentials."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import final

from replicax._src.cluster.control_messages import connect
from replicax._src.cluster.credentials import TOKEN_VARIABLE, Credentials
from replicax._src.cluster.routes import routed_address
from replicax._src.cluster.spec import join_address, split_address
from replicax._src.vocabulary.errors import (
    MessageError,
    ReplicaxError,
    UnauthenticatedError,
    UnavailableError,
)
from replicax._src.wire.connection import Connection
from replicax._src.wire.errors import ForeignPeerError, OtherProgramError, PeerEndedError, TokenError
from replicax._src.wire.listener import Listener
from replicax._src.wire.sockets import listen

log = logging.getLogger("replicax")


@final
class Endpoint:
    """The address of a task, and the credentials that it shares with the other tasks.

    Args:
      address: ``host:port``. Port 0 takes a free one.
      credentials: The credentials. Their files are read now.
      task: The task's name, for messages and errors: ``"ps 0"``.

    Attributes:
      address: ``host:port``.
      port: The port.

    Raises:
      AddressError: The address, or a route of the environment, is malformed.
      InvalidArgumentError: A file of the credentials cannot be read.
    """

    def __init__(self, address: str, credentials: Credentials, task: str = "the task"):
        self._credentials, self._security = credentials, credentials.security()
        self.address, (self._host, self.port) = address, split_address(address)
        self._task = task

    def __str__(self) -> str:
        return f"{self._task} at {self.address}"

    def with_port(self, port: int) -> str:
        """Returns ``host:port`` of this host."""
        return join_address(self._host, port)

    # --- for the task itself ------------------------------------------------------------------------------

    def listen(self, serve: Callable[[Connection], None], rejected: Callable[[], None]) -> Listener:
        """Listens, and serves each authenticated peer on a thread of its own.

        Args:
          serve: Called for each peer. The connection is closed when it returns.
          rejected: Called for each peer that is rejected.

        Raises:
          UnavailableError: It cannot listen there; the port may be in use.
        """
        if self._credentials.admits_anybody:
            log.warning(
                "The task at %s has no credentials, so any program of this machine may use it. Set %s to a secret, the "
                "same for all tasks.",
                self.address,
                TOKEN_VARIABLE,
            )
        try:
            listening = listen(self._host, self.port)
        except OSError as error:
            raise UnavailableError(
                f"The task cannot listen at {self.address}: {error.strerror or error}. The port may be in "
                "use, or the host may be another machine."
            ) from error
        return Listener(listening, self._security, serve, rejected)

    # --- for the other tasks ------------------------------------------------------------------------------

    def check_route(self) -> None:
        """Checks the routes of the environment (``REPLICAX_ROUTES``).

        Raises:
          ClusterError: They are malformed.
        """
        routed_address(self.address, os.environ)

    def connect(self, deadline: float) -> Connection:
        """Connects to the task, along its current route.

        Raises:
          OSError: It does not answer in time, or another program answers. ``failure`` makes a public error of it.
        """
        return connect(self.address, self._security, deadline)

    def failure(self, error: OSError, did: str) -> ReplicaxError:
        """Translates an error of a connection with the task into a public one.

        Args:
          error: The error.
          did: A verb phrase for what the task did not do: ``"answer 'hello' within 2 s"``.
        """
        if isinstance(error, TokenError):
            return UnauthenticatedError(
                f"The credentials differ from those of {self}: {error}. Give all tasks of the cluster "
                f"the same token ({TOKEN_VARIABLE})."
            )
        if isinstance(error, TimeoutError):
            return UnavailableError(
                f"{self} did not {did}: it is stopped, busy, or unreachable.", self._task, is_silent=True
            )
        if isinstance(error, PeerEndedError) and error.is_refusal:
            return MessageError(f"{self}: {error.reason}")
        if isinstance(error, ForeignPeerError) and not isinstance(error, OtherProgramError):
            return MessageError(f"{self}: {error}.")
        why = error.strerror or str(error)
        hint = ""
        if isinstance(error, PeerEndedError) and not error.reason and did.startswith("take a connection"):
            hint = " Check that both use the same TLS settings."
        return UnavailableError(f"{self} did not {did}: {why}.{hint}", self._task)

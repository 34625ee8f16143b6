"""``Credentials``: the token and the TLS certificates of a cluster's tasks. Pure, except that it reads files."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import logging
import os
import secrets
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self, final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.spec import split_address
from replicax._src.untrusted.file_access import readers_of, writers_of
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.wire.security import CHECKSUMS_VARIABLE, Security

log = logging.getLogger("replicax")

TOKEN_VARIABLE = "REPLICAX_TOKEN"
TOKEN_FILE_VARIABLE = "REPLICAX_TOKEN_FILE"
CA_VARIABLE = "REPLICAX_TLS_CA"
CERTIFICATE_VARIABLE = "REPLICAX_TLS_CERTIFICATE"
KEY_VARIABLE = "REPLICAX_TLS_KEY"
_FILES = {"ca_file": CA_VARIABLE, "certificate_file": CERTIFICATE_VARIABLE, "key_file": KEY_VARIABLE}

_HOW = (
    f"Set {TOKEN_VARIABLE} (or {TOKEN_FILE_VARIABLE}) to the same secret on all tasks, or {CA_VARIABLE}, "
    f"{CERTIFICATE_VARIABLE} and {KEY_VARIABLE} for mutual TLS"
)


@final
@dataclass(frozen=True)
class Credentials:
    """The secrets that a task presents to other tasks and asks of them. All tasks of a cluster have the same kind.

    With a certificate, its key and a CA the tasks use *mutual TLS*: both sides present a certificate that the CA
    signed. A server with a certificate and no CA accepts clients by their token; the clients of such a server have a CA
    only. Files are PEM, and are read when a server or a client starts. An authenticated peer is fully trusted: it may
    use memory, and a worker runs the dataset functions that it receives.

    Attributes:
      token: A random secret that all tasks know. It is never sent. Without TLS, messages are not encrypted.
      ca_file: The certificates of the authorities that sign the certificates of the other tasks.
      certificate_file: The certificate of this task. It must be valid for the host of the task's address.
      key_file: The key of the certificate.

    Raises:
      InvalidArgumentError: The token is empty or has characters other than visible ASCII, or a file is missing.
    """

    token: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    certificate_file: str | None = None
    key_file: str | None = None

    def __post_init__(self) -> None:
        if self.token is not None and not (self.token.isascii() and self.token.isprintable() and self.token):
            raise InvalidArgumentError(
                f"A token must be of visible ASCII characters, got {'an empty one' if not self.token else 'others'}. "
                f'Make one with: python -c "import secrets; print(secrets.token_urlsafe(32))".'
            )
        if self.token is not None and self.token != self.token.strip():
            raise InvalidArgumentError("A token must not begin or end with a space. Remove it.")
        if (self.certificate_file is None) != (self.key_file is None):
            there = "certificate_file" if self.key_file is None else "key_file"
            raise InvalidArgumentError(
                f"{there}={getattr(self, there)!r} was given alone. Give both the certificate and its key."
            )

    @classmethod
    def from_environment(cls, environ: Mapping[str, str]) -> Self:
        """Returns the credentials that the environment describes, which may be none.

        It reads ``REPLICAX_TOKEN``, or the token from the file ``REPLICAX_TOKEN_FILE``, and the paths
        ``REPLICAX_TLS_CA``, ``REPLICAX_TLS_CERTIFICATE`` and ``REPLICAX_TLS_KEY``.

        Raises:
          ClusterEnvironmentError: The variables contradict each other, or a file cannot be read.
        """
        files = {name: environ[variable] for name, variable in _FILES.items() if variable in environ}
        try:
            made = cls(token=_token_of(environ), **files)
            made.check_files()
        except InvalidArgumentError as error:
            there = [
                name for name in (TOKEN_VARIABLE, TOKEN_FILE_VARIABLE, *_FILES.values()) if name in environ
            ]
            raise ClusterEnvironmentError(f"{', '.join(there)} in the environment: {error}") from error
        return made

    @property
    def is_mutual(self) -> bool:
        """True if a client must present a certificate."""
        return self.certificate_file is not None and self.ca_file is not None

    @property
    def uses_tls(self) -> bool:
        """True if connections are encrypted."""
        return self.certificate_file is not None or self.ca_file is not None

    def check_server(self, address: str) -> None:
        """Checks that a task may listen at ``address`` with these credentials.

        Raises:
          InvalidArgumentError: Other machines can reach the address, and every peer would be accepted.
        """
        if self.uses_tls and self.certificate_file is None:
            raise InvalidArgumentError(
                f"The task at {address} has a CA and no certificate. Set {CERTIFICATE_VARIABLE} and {KEY_VARIABLE} too."
            )
        if self.token is None and not self.is_mutual and not is_loopback(split_address(address)[0]):
            raise InvalidArgumentError(
                f"The task at {address} would accept everybody who can reach this machine. {_HOW}. Only a task at localhost "
                f"or 127.0.0.1 needs neither."
            )

    @property
    def admits_anybody(self) -> bool:
        """True if a server with these credentials accepts unauthenticated peers."""
        return self.token is None and not self.is_mutual

    def security(self, environ: Mapping[str, str] | None = None) -> Security:
        """Returns the security of connections, from these credentials and ``REPLICAX_CHECKSUMS`` in the environment.

        Raises:
          InvalidArgumentError: A file cannot be read, or has the wrong content.
        """
        always_checks = (os.environ if environ is None else environ).get(CHECKSUMS_VARIABLE) == "1"
        token = (self.token or "").encode()
        if not self.uses_tls:
            return Security(token, always_checks=always_checks)
        self.check_files()
        try:
            client = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            if self.ca_file is None:
                client.load_default_certs()
            else:
                client.load_verify_locations(self.ca_file)
            server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            server.num_tickets = (
                0  # no TLS session is resumed, and a peer that only writes would have to read the tickets
            )
            if self.certificate_file is not None:
                client.load_cert_chain(self.certificate_file, self.key_file)
                server.load_cert_chain(self.certificate_file, self.key_file)
            if self.is_mutual:
                server.load_verify_locations(self.ca_file)
                server.verify_mode = ssl.CERT_REQUIRED
        except ssl.SSLError as error:
            raise InvalidArgumentError(
                f"ca_file={self.ca_file!r}, certificate_file={self.certificate_file!r} and key_file={self.key_file!r} "
                f"are not a CA, a certificate and its key: {error}. Check them with openssl."
            ) from error
        return Security(token, client, server, always_checks=always_checks)

    def check_files(self) -> None:
        """Checks that the files can be read and are PEM.

        Raises:
          InvalidArgumentError: A file cannot be read, or is not PEM.
        """
        for name in _FILES:
            path = getattr(self, name)
            if path is not None:
                _check_file(name, path)


def _check_file(name: str, path: str) -> None:
    try:
        data = _read_trusted(f"{name}:", path, is_secret=name == "key_file")
    except OSError as error:
        raise InvalidArgumentError(
            f"{name}={path!r} cannot be read: {error.strerror}. Give the path of a PEM file ({_FILES[name]})."
        ) from error
    if b"-----BEGIN " not in data:
        raise InvalidArgumentError(
            f"{name}={path!r} is not a PEM file: it has no line '-----BEGIN ...'. Convert it with openssl ({_FILES[name]})."
        )


def random_token() -> str:
    """Returns a random token of 256 bits."""
    return secrets.token_urlsafe(32)


def is_loopback(host: str) -> bool:
    """Returns True if only processes of this machine can reach ``host``: ``localhost``, ``127.0.0.1``, ``::1``."""
    with contextlib.suppress(ValueError):
        address = ipaddress.ip_address(host)
        return address.is_loopback if address.version == 4 else host == "::1"
    return host == "localhost"


def _token_of(environ: Mapping[str, str]) -> str | None:
    if TOKEN_VARIABLE in environ and TOKEN_FILE_VARIABLE in environ:
        raise InvalidArgumentError("There are two tokens. Leave one of them out.")
    path = environ.get(TOKEN_FILE_VARIABLE)
    if path is None:
        return environ.get(TOKEN_VARIABLE)
    try:
        return _read_trusted("The token's file", path, is_secret=True).decode().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgumentError(f"The token's file {path!r} cannot be read: {error}.") from error


def _read_trusted(what: str, path: str, *, is_secret: bool) -> bytes:
    """Reads a file of credentials. The permissions are those of the file behind links.

    Raises:
      OSError: It cannot be read.
      InvalidArgumentError: Other users may write it.
    """
    with open(path, "rb") as file:
        about = os.fstat(file.fileno())
        if writers := writers_of(about):
            raise InvalidArgumentError(
                f"{what} {path!r} cannot be trusted: {writers}. Make it yours, and only yours to write: chmod 600."
            )
        if is_secret and (readers := readers_of(about)):
            _warn_of_readers(what, path, readers)
        return file.read()


@functools.cache
def _warn_of_readers(what: str, path: str, readers: str) -> None:
    """Warns once for each file. It is no error, because Kubernetes mounts secrets with mode 0644."""
    log.warning(
        "%s %r is not secret: %s. Give it the mode 0600; in Kubernetes, give its volume defaultMode: 0400 and the pod an "
        "fsGroup.",
        what,
        path,
        readers,
    )

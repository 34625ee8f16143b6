"""``StatusServer``: serves the status of a job over HTTP.

``status.py`` has the contents, and ``access.py`` the access rule.
"""

from __future__ import annotations

import http.client
import http.server
import io
import json
import logging
import os
import socket
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.errors import AddressError
from replicax._src.cluster.figures import figures, job_figures
from replicax._src.cluster.machine_layout import STATUS_ADDRESS_VARIABLE
from replicax._src.cluster.spec import join_address, split_address
from replicax._src.status import metrics
from replicax._src.status.access import StatusAccess
from replicax._src.status.curves import pictures
from replicax._src.status.history_file import HistoryFile
from replicax._src.status.page import CONTENT_SECURITY_POLICY, page_of
from replicax._src.status.status import Recent, curve_values_of
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.wire.acceptor import HANDSHAKE_S, Acceptor
from replicax._src.wire.sockets import shut_down

_log = logging.getLogger("replicax")
_SAMPLE_S: Final = 1.0
_SAVE_S: Final = 10.0
_LARGEST_REQUEST: Final = 4096
_JOIN_S: Final = 5.0
_RETRY_S: Final = 0.2
_LOOK_S: Final = 2.0
_ANYWHERE: Final = ("0.0.0.0", "::")


@final
class StatusServer:
    """Serves ``/``, a page; ``/status.json``; and ``/metrics``. ``close`` ends its threads.

    Args:
      address: ``host:port``. Port 0 takes a free one.
      token: The cluster's token. A request from another machine needs its ``viewing_token``.
      read_status: Returns the current status, without rates. A thread calls it once a second, for rates and curves.

    Attributes:
      address: The ``host:port`` at which it answers.

    Raises:
      InvalidArgumentError: Other machines can reach the address, and there is no token.
      AddressError: It is not ``host:port``, or the server cannot listen there.
    """

    def __init__(
        self,
        address: str,
        token: str | None,
        read_status: Callable[[], dict[str, Any]],
    ):
        self.access = StatusAccess(address, token)
        host, port = split_address(address)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            listening = socket.create_server((host, port), family=family)
        except OSError as error:
            raise AddressError(
                f"The status cannot be served at {address}: {error.strerror or error}. The port may be in "
                "use, or the host may be another machine. Choose another address, or port 0 for a free one."
            ) from error
        self.address = join_address(
            socket.gethostname() if host in _ANYWHERE else host, listening.getsockname()[1]
        )
        self._acceptor = Acceptor(listening, self._answer)
        self._read_status = read_status
        self._recent = Recent()
        # It keeps the curves for the process that serves after a restart.
        self._history_file = HistoryFile.from_environment(os.environ)
        self._history = self._history_file.load()
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="replicax-status", daemon=True)

    @property
    def url(self) -> str:
        """The URL of the page, with the token if one is needed."""
        return f"http://{self.address}/" + ("" if self.access.is_local else f"?token={self.access.token}")

    def start(self) -> None:
        """Starts to answer."""
        self._thread.start()
        self._acceptor.start()

    def close(self) -> None:
        """Ends the server. May be called again."""
        self._is_closed.set()
        self._acceptor.close()
        if self._thread.ident is not None:
            self._thread.join(_JOIN_S)

    def status(self) -> dict[str, Any]:
        """Returns the current status, with rates."""
        with self._lock:
            return self._recent.with_rates(self._read_status())

    def page(self, query: str) -> str:
        """Returns the page; see ``page.page_of``."""
        status = self.status()
        with self._lock:
            curves = pictures(self._history, status["time"])
        return page_of(status, query, curves)

    def _sample(self) -> None:
        saved_at = time.monotonic()
        while not self._is_closed.is_set():
            with self._lock:
                status = self._read_status()
                self._history.add(status["time"], curve_values_of(self._recent.with_rates(status)))
                self._recent.add(status)
            if time.monotonic() - saved_at >= _SAVE_S:
                saved_at = time.monotonic()
                self._history_file.save(self._history)
            self._is_closed.wait(_SAMPLE_S)
        self._history_file.save(self._history)

    def _answer(self, connection: socket.socket, peer: str) -> None:
        try:
            _Handler(connection, split_address(peer), self)  # type: ignore[arg-type]  # it wants a server of socketserver
        except Exception:  # the request gets no answer; most of these peers have gone
            _log.debug("A request for the status from %s failed.", peer, exc_info=True)
        finally:
            shut_down(connection)
            connection.close()


def server_of_environment(
    address: str, token: str | None, read_status: Callable[[], dict[str, Any]], wait_s: float = 0.0
) -> StatusServer | None:
    """Returns a server at the address of ``REPLICAX_STATUS_ADDRESS``. If it cannot serve there within ``wait_s``, warns
    and returns None: the job does not need its status. While another process serves a status there, a call with
    ``wait_s`` waits longer, without a warning.
    """
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return StatusServer(address, token, read_status)
        except (AddressError, InvalidArgumentError) as error:
            if time.monotonic() >= deadline:
                if not (wait_s and _serves_status(address)):
                    _log.warning("This job has no status, because of %s: %s", STATUS_ADDRESS_VARIABLE, error)
                    return None
                deadline = time.monotonic() + wait_s
        time.sleep(_RETRY_S)


def _serves_status(address: str) -> bool:
    """Returns True if a process of replicax serves a status at an address."""
    connection = http.client.HTTPConnection(*split_address(address), timeout=_LOOK_S)
    try:
        connection.request("HEAD", "/")
        return connection.getresponse().getheader("Server", "").startswith(_Handler.server_version)
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def server_of_tasks(
    address: str, read_status: Callable[[dict[str, Any]], dict[str, Any]], *, must_serve: bool
) -> StatusServer | None:
    """Returns a server of the status of a job whose tasks this process knows, with the token of the environment.

    Args:
      address: ``host:port``.
      read_status: Returns the status of the tasks, given the ``FIGURES`` of this process.
      must_serve: False if it is only a warning that it cannot serve at the address; then None is returned.
    """
    make = StatusServer if must_serve else server_of_environment
    token = Credentials.from_environment(os.environ).token
    return make(address, token, lambda: {**read_status(figures()), **job_figures()})


@final
class _Handler(http.server.BaseHTTPRequestHandler):
    server: StatusServer  # type: ignore[assignment]
    server_version = "replicax"
    sys_version = ""

    def setup(self) -> None:
        """Reads the request within a limit of time and of bytes, so that no client can block a thread."""
        super().setup()
        deadline, data = time.monotonic() + HANDSHAKE_S, b""
        while b"\r\n\r\n" not in data and len(data) < _LARGEST_REQUEST:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.connection.recv(_LARGEST_REQUEST - len(data))
            if not part:
                break
            data += part
        self.connection.settimeout(HANDSHAKE_S)
        is_whole = b"\r\n\r\n" in data
        self.rfile = io.BufferedReader(io.BytesIO(data if is_whole else b""))

    def do_GET(self) -> None:
        """Answers a request."""
        url = urllib.parse.urlsplit(self.path)
        shown = urllib.parse.parse_qs(url.query).get("token", [None])[0]
        if not self.server.access.admits(
            self.client_address[0], self.headers.get("Host"), self._bearer or shown
        ):
            self._refuse()
            return
        pages: Mapping[str, Callable[[], tuple[str, str]]] = {
            "/": lambda: (
                "text/html; charset=utf-8",
                self.server.page("" if shown is None else f"?{urllib.parse.urlencode({'token': shown})}"),
            ),
            "/status.json": lambda: ("application/json", json.dumps(self.server.status()) + "\n"),
            "/metrics": lambda: (metrics.CONTENT_TYPE, metrics.metrics_of(self.server.status())),
        }
        page = pages.get(url.path)
        if page is None:
            self._answer(404, "text/plain; charset=utf-8", f"There are {', '.join(pages)}.\n")
        else:
            self._answer(200, *page())

    do_HEAD = do_GET

    @property
    def _bearer(self) -> str | None:
        kind, _, token = self.headers.get("Authorization", "").partition(" ")
        return token.strip() if kind.lower() == "bearer" else None

    def _refuse(self) -> None:
        if self.server.access.token is None:
            why = "This status is for programs of this machine, at an address such as http://127.0.0.1:PORT/."
        else:
            why = (
                "This status needs a token: /?token=TOKEN, or a header 'Authorization: Bearer TOKEN'. The "
                "status_url of a ClusterCoordinator has it, and replicax top derives it from REPLICAX_TOKEN."
            )
        self._answer(401, "text/plain; charset=utf-8", f"{why}\n", {"WWW-Authenticate": "Bearer"})

    def _answer(self, code: int, kind: str, text: str, more: Mapping[str, str] | None = None) -> None:
        body = text.encode(errors="backslashreplace")  # a name from the file system may have half a character
        self.send_response(code)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": CONTENT_SECURITY_POLICY,
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            **(more or {}),
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs nothing, because requests contain the token."""

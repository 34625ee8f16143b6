"""``StatusServer``: HTTP for whoever looks at the coordinator.

What is said is ``status.py``'s, to whom ``status_access.py``'s.
"""

from __future__ import annotations

import http.server
import io
import json
import logging
import socket
import socketserver
import threading
import time
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any, Final, final

from replicax._src.cluster.spec import join_address, split_address
from replicax._src.parameter_servers.coordinator import metrics
from replicax._src.parameter_servers.coordinator.status import Recent
from replicax._src.parameter_servers.coordinator.status_access import StatusAccess
from replicax._src.parameter_servers.coordinator.status_page import CONTENT_SECURITY_POLICY, page_of
from replicax._src.parameter_servers.errors import UnavailableError
from replicax._src.wire.sockets import shut_down

_log = logging.getLogger(__name__)
_TICK_S: Final = 0.2
_SAMPLE_S: Final = 1.0
_REQUEST_S: Final = 5.0
_LARGEST_REQUEST: Final = 4096
_MOST_CONNECTIONS: Final = 256
_JOIN_S: Final = 5.0
_ANYWHERE: Final = ("0.0.0.0", "::")


@final
class StatusServer:
    """Serves ``/``, a page; ``/status.json``; and ``/metrics``. Two or more threads, which end with ``close``.

    Args:
      address: ``host:port``. Port 0 takes a free one.
      token: Of the cluster; who comes from another machine shows what ``viewing_token`` makes of it.
      look: The status now, without rates. Called once a second besides, to know what happened lately.

    Raises:
      InvalidArgumentError: Other machines reach the address, and there is no token.
      UnavailableError: It cannot listen there.
    """

    def __init__(self, address: str, token: str | None, look: Callable[[], dict[str, Any]]):
        self._access = StatusAccess(address, token)
        host, _ = split_address(address)
        try:
            self._listener = _Listener(address, self._access, look)
        except OSError as error:
            raise UnavailableError(
                f"The status cannot be served at {address}: {error.strerror or error}. Is the port in use, or the host of "
                f"another machine? Choose another address, or port 0 for a free one."
            ) from error
        self._host = socket.gethostname() if host in _ANYWHERE else host
        self._thread = threading.Thread(
            target=self._listener.serve_forever, args=(_TICK_S,), name="replicax-status", daemon=True
        )
        self._is_started = False

    @property
    def url(self) -> str:
        """Of the page, with the token where one is needed."""
        address = join_address(self._host, self._listener.server_address[1])
        needs_token = not self._access.is_local
        return f"http://{address}/" + (f"?token={self._access.token}" if needs_token else "")

    def start(self) -> None:
        """Begins to answer."""
        self._is_started = True
        self._thread.start()

    def close(self) -> None:
        """Ends it. May be called again."""
        if self._is_started:
            self._listener.shutdown()
            self._thread.join(_JOIN_S)
        self._listener.server_close()


@final
class _Listener(socketserver.ThreadingMixIn, socketserver.TCPServer):
    # Not http.server's: that looks up its own name, which can take long.
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 32

    def __init__(self, address: str, access: StatusAccess, look: Callable[[], dict[str, Any]]):
        host, port = split_address(address)
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.access = access
        self._look = look
        self._recent = Recent()
        self._lock = threading.Lock()
        self._next_sample = time.monotonic()
        self._connections: dict[socket.socket, None] = {}  # in the order in which they came
        super().__init__((host, port), _Handler)

    def get_request(self) -> tuple[Any, Any]:
        """The next connection. It waits a little when the process has no descriptor left, and would ask at once."""
        try:
            return super().get_request()
        except OSError:
            time.sleep(_TICK_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answers on a thread of its own. When there are too many connections the oldest is dropped."""
        with self._lock:
            if len(self._connections) >= _MOST_CONNECTIONS:
                oldest = next(iter(self._connections))
                del self._connections[oldest]
                shut_down(oldest)
            self._connections[request] = None
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Ends a connection."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called at least every 0.2 s."""
        now = time.monotonic()
        if now >= self._next_sample:
            self._next_sample = now + _SAMPLE_S
            with self._lock:
                self._recent.add(self._look())

    def status(self) -> dict[str, Any]:
        """The status now, with rates."""
        with self._lock:
            return self._recent.with_rates(self._look())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Of one request: it has no answer, and all goes on. Most are of peers that have gone."""
        _log.debug("A request for the status from %s has failed.", client_address, exc_info=True)


@final
class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Listener
    server_version = "replicax"
    sys_version = ""

    def setup(self) -> None:
        """Reads the request within a limit of time and of bytes, whoever sends it."""
        super().setup()
        deadline, data = time.monotonic() + _REQUEST_S, b""
        while b"\r\n\r\n" not in data and len(data) < _LARGEST_REQUEST:
            self.connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = self.connection.recv(_LARGEST_REQUEST - len(data))
            if not part:
                break
            data += part
        self.connection.settimeout(_REQUEST_S)
        is_whole = b"\r\n\r\n" in data
        self.rfile = io.BufferedReader(io.BytesIO(data if is_whole else b""))

    def do_GET(self) -> None:
        """Answers."""
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
                page_of(
                    self.server.status(),
                    "" if shown is None else f"?{urllib.parse.urlencode({'token': shown})}",
                ),
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
                "This status needs a token: /?token=TOKEN, or a header 'Authorization: Bearer TOKEN'. The coordinator's "
                "status_url has it; replicax top makes it of REPLICAX_TOKEN."
            )
        self._answer(401, "text/plain; charset=utf-8", f"{why}\n", {"WWW-Authenticate": "Bearer"})

    def _answer(self, code: int, kind: str, text: str, more: Mapping[str, str] | None = None) -> None:
        body = text.encode()
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
        """Requests are nothing to tell; with them the token would be in the log."""

"""Servers on loopback, for clients that ask over HTTP."""

import contextlib
import http.server
import json
import threading

import pytest


@pytest.fixture
def json_server():
    """``json_server(answer)``: the address of a server; ``answer(method, path)`` gives a status and what becomes JSON."""
    with contextlib.ExitStack() as stack:
        yield lambda answer: stack.enter_context(_served(answer))


@contextlib.contextmanager
def _served(answer):
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            status, content = answer(self.command, self.path)
            body = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_POST = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()

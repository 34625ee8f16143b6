"""``Watching``: ``replicax top`` attached to a job, as a user attaches it from another shell."""

import contextlib
import json
import socket
import subprocess
import sys
import threading
import time
import urllib.request

from launched_jobs import environment
from replicax._src.status.access import viewing_token

FIGURES = ("steps_per_s", "examples_per_s", "loss", "data_share", "own_share", "resident_bytes")


class Watching:
    """Follows a job from when something answers at the address until the block ends.

    Attributes:
      statuses: What it was told, one after another.
    """

    def __init__(self, address, token):
        self._address, self._token = address, token
        self._is_over, self._top, self.statuses = threading.Event(), None, []
        self._thread = threading.Thread(target=self._follow)

    def _follow(self):
        host, _, port = self._address.rpartition(":")
        while not self._is_over.wait(0.2):
            with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 5):
                break
        command = ["top", self._address, "--json", "--interval", "0.3", "--wait", "300"]
        with subprocess.Popen(
            [sys.executable, "-m", "replicax", *command],
            env=environment() | {"REPLICAX_TOKEN": self._token},
            stdout=subprocess.PIPE,
            text=True,
        ) as self._top:
            self.statuses.extend(json.loads(line) for line in self._top.stdout if line.endswith("\n"))

    def shows_all(self, restarts):
        """True if it was told all figures of all tasks at once, in the start after so many restarts."""
        return any(
            all(
                task["restarts"] == restarts and all(task.get(name) is not None for name in FIGURES)
                for task in status["tasks"]
            )
            for status in self.statuses
        )

    def metrics(self):
        """Returns the lines that Prometheus gets."""
        head = {"Authorization": f"Bearer {viewing_token(self._token)}"}
        request = urllib.request.Request(f"http://{self._address}/metrics", headers=head)
        return urllib.request.urlopen(request, timeout=30).read().decode().splitlines()

    def wait_for_all(self, restarts, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while not self.shows_all(restarts):
            assert time.monotonic() < deadline, self.statuses[-3:]
            time.sleep(0.05)

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *error):
        self._is_over.set()
        while self._thread.is_alive():
            if self._top is not None:
                self._top.kill()
            self._thread.join(0.1)

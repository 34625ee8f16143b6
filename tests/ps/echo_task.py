"""A task that answers its messages, in a separate process: ``python echo_task.py ADDRESS HANDSHAKE_S``, until stdin
ends.
"""

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskServer
from replicax._src.cluster.credentials import Credentials
from replicax._src.wire import listener
from replicax.errors import UnknownProgramError


class Echo:
    """Answers messages. ``op`` of a message, or the question: echo, fail, unknown, sleep, wait, make, statistics."""

    def __init__(self):
        self.server = None
        self.num_answered = 0
        self.waits, self.may_go_on = threading.Event(), threading.Event()

    def answer(self, message):
        self.num_answered += 1
        op = message.header.get("ask", message.header.get("op"))
        if op == "statistics":
            return Message(self.server.statistics())
        header = self._done(op, message.header)
        if op == "make":
            return Message({}, [np.zeros(message.header["bytes"], np.uint8)])
        return Message({**header, "answered": self.num_answered}, message.arrays)

    def _done(self, op, header):
        if op == "fail":
            raise ValueError("as it was asked")
        if op == "unknown":
            raise UnknownProgramError("no such program", "abc")
        if op == "sleep":
            time.sleep(header["s"])
        if op == "wait":
            self.waits.set()
            self.may_go_on.wait(60)
        return dict(header)


def echo_server(address="127.0.0.1:0", credentials=None, **options):
    """A server in this process."""
    service = Echo()
    service.server = TaskServer(
        address, service.answer, credentials or Credentials(token="secret"), **options
    )
    service.server.echo = service
    return service.server


class EchoTask:
    """The server in another process. ``handshake_s`` is the longest time that a peer may take to authenticate."""

    def __init__(self, address="127.0.0.1:0", credentials=None, handshake_s=listener.HANDSHAKE_S):
        credentials = credentials or Credentials(token="secret")
        variables = {
            "REPLICAX_TOKEN": credentials.token,
            "REPLICAX_TLS_CA": credentials.ca_file,
            "REPLICAX_TLS_CERTIFICATE": credentials.certificate_file,
            "REPLICAX_TLS_KEY": credentials.key_file,
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, address, str(handshake_s)],
            env={**os.environ, **{k: v for k, v in variables.items() if v is not None}},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        line = self.process.stdout.readline()
        assert line, "the task did not start"
        self.address = line.strip()

    @property
    def port(self):
        return int(self.address.rpartition(":")[2])

    def kill(self):
        self.process.kill()
        self.process.wait(60)

    @contextlib.contextmanager
    def stopped(self):
        self.process.send_signal(signal.SIGSTOP)
        try:
            while self._status("State").split()[0] != "T":
                time.sleep(0.005)
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def memory(self, what="VmRSS"):
        """Bytes; ``VmHWM`` is the peak."""
        return int(self._status(what).split()[0]) * 1024

    def _status(self, what):
        with open(f"/proc/{self.process.pid}/status") as status:
            return next(line.partition(":")[2] for line in status if line.startswith(what + ":"))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.send_signal(signal.SIGCONT)
        self.kill()
        self.process.stdin.close()
        self.process.stdout.close()


if __name__ == "__main__":
    listener.HANDSHAKE_S = float(sys.argv[2])
    with echo_server(sys.argv[1], Credentials.from_environment(os.environ)) as server:
        print(server.address, flush=True)
        sys.stdin.read()

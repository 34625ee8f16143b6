"""A separate process with another library, which runs its part of a benchmark on command."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

_ANSWER_S = 300.0
_END_S = 10.0


class PeerProcess:
    """Runs a script of this folder with another Python; both exchange lines of JSON.

    Args:
      python: A Python that has the library.
      script: The script's name.
      setting: The first message.
      waits: True to wait until the script has made its part; otherwise the first call of ``hear`` waits.
    """

    def __init__(self, python: str, script: str, setting: dict[str, Any], *, waits: bool = True):
        self._script = script
        self._asked: dict[str, Any] = {}
        self._answers: queue.Queue[str] = queue.Queue()
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed in close()
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._listen, daemon=True).start()
        self.tell(setting)
        if waits:
            self.hear()

    def run(self, count: int, **more: Any) -> Any:
        """Does ``count`` steps and waits. Returns the result of the script's function."""
        self.tell({"count": count, **more})
        return self.hear()

    def tell(self, message: dict[str, Any]) -> None:
        """Sends a message; ``hear`` then waits for the answer."""
        assert self._process.stdin is not None
        self._asked = message
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            self._give_up()

    def hear(self) -> Any:
        """Waits for the answer."""
        try:
            answer = self._answers.get(timeout=_ANSWER_S)
        except queue.Empty:
            answer = ""
        return json.loads(answer)["result"] if answer else self._give_up()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._answers.put(line)
        self._answers.put("")

    def _give_up(self) -> Any:
        self._errors.seek(0)
        last_lines = "".join(self._errors.readlines()[-20:])
        raise SystemExit(
            f"{self._script} ended or did not answer; it was asked for {self._asked}.\n{last_lines}"
        )

    def end(self) -> None:
        """Tells the process to end, without waiting for it."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def close(self) -> None:
        """Ends the process, and kills it if it does not end."""
        self.end()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()


def answer(build: Any) -> None:
    """The main loop of a script: makes its part from the first message, and runs it on every command.

    The script ends when no more messages can come, even in the middle of its work, or if it hangs on exit.
    """
    messages: queue.Queue[str] = queue.Queue()
    threading.Thread(target=_forward, args=(messages,), daemon=True).start()
    run = result = None
    while line := messages.get():
        message = json.loads(line)
        if run is None:
            run = build(**message)
        else:
            result = run(message.pop("count"), **message)
        print(json.dumps({"result": result}), flush=True)


def _forward(messages: queue.Queue[str]) -> None:
    for line in sys.stdin:
        messages.put(line)
    messages.put("")
    time.sleep(_END_S)
    os._exit(1)

"""A process of its own with another library, which does its part of a benchmark when told to."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path
from typing import Any


class PeerProcess:
    """Runs a script of this folder with another Python; they talk in lines of JSON.

    Args:
      python: A Python that has the library.
      script: The script's name.
      setting: The first message.
    """

    def __init__(self, python: str, script: str, setting: dict[str, Any]):
        self._script = script
        self._process = subprocess.Popen(
            [python, str(Path(__file__).parent / script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._ask(setting)

    def run(self, count: int) -> Any:
        """Does ``count`` steps and waits. Returns what the script's function returned."""
        return self._ask({"count": count})

    def _ask(self, message: dict[str, Any]) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(message), file=self._process.stdin, flush=True)
        deadline = time.monotonic() + 300
        for line in self._process.stdout:
            if line.startswith("{"):
                return json.loads(line)["result"]
            if time.monotonic() > deadline:
                break
        raise SystemExit(f"{self._script} ended or did not answer; it was asked for {message}.")

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(timeout=30)


def answer(build: Any) -> None:
    """What a script does: makes its part from the first message, and runs it as often as it is told to."""
    import sys

    run = result = None
    for line in sys.stdin:
        message = json.loads(line)
        if run is None:
            run = build(**message)
        else:
            result = run(message["count"])
        print(json.dumps({"result": result}), flush=True)

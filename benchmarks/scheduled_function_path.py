"""Lists the files of replicax that one scheduled function enters in three processes, and its path to the
worker's socket.

``python benchmarks/scheduled_function_path.py`` prints a table. When everything is compiled and sent, a
training step is scheduled several times. Each process records with ``sys.setprofile`` which files are entered
until the result is fetched. A file counts if every repetition enters it: heartbeats and other background
threads do not belong to the function.
"""

from __future__ import annotations

import os

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.pop("PJRT_NPROC", None)

import argparse
import contextlib
import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any, Final, final

import numpy as np

_ROOT: Final = Path(__file__).resolve().parents[1] / "src" / "replicax"
_NUM_WARM, _NUM_MEASURED = 30, 40
_END_S: Final = 20.0
_SENDS: Final = ("send", "sendall", "sendmsg", "write")


@final
class Recorder:
    """Records the files that are entered while it is on, in threads that start after ``install``."""

    def __init__(self) -> None:
        self._prefix = str(_ROOT) + os.sep
        self._is_on = False
        self.files: set[str] = set()
        self.way: list[str] | None = None

    def install(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def begin(self) -> None:
        self.files, self.way, self._is_on = set(), None, True

    def end(self) -> None:
        self._is_on = False

    def _note(self, frame: FrameType, event: str, arg: Any) -> None:
        if not self._is_on:
            return
        if event == "call":
            path = frame.f_code.co_filename
            if path.startswith(self._prefix):
                self.files.add(path.removeprefix(self._prefix))
        elif event == "c_call" and self.way is None and _is_send(arg):
            self.way = list(self._stack(frame))

    def _stack(self, frame: FrameType | None) -> Iterator[str]:
        """Functions of replicax on the stack, outermost first."""
        found = []
        while frame is not None:
            path = frame.f_code.co_filename
            if path.startswith(self._prefix):
                found.append(f"{path.removeprefix(self._prefix)}:{frame.f_code.co_qualname}")
            frame = frame.f_back
        return reversed(found)


def _is_send(function: Any) -> bool:
    name, owner = getattr(function, "__name__", ""), getattr(function, "__self__", None)
    is_socket = isinstance(owner, socket.socket) or type(owner).__name__ == "_SSLSocket"
    return name in _SENDS and is_socket


# --- the worker and the parameter server ------------------------------------------------------------------


def serve(job: str) -> None:
    """One task. Each line on standard input is ``begin`` or ``end``; the answer to ``end`` is the files, as JSON."""
    recorder = Recorder()
    recorder.install()
    import replicax as rx

    with rx.Server(json.loads(os.environ["TF_CONFIG"])["cluster"], job, 0):
        for line in sys.stdin:
            (recorder.begin if line.strip() == "begin" else recorder.end)()
            print(json.dumps(sorted(recorder.files)), flush=True)


@final
class Task:
    """A task's process, controlled by the measurement."""

    def __init__(self, job: str, cluster: dict[str, list[str]]):
        config = {"cluster": cluster, "task": {"type": job, "index": 0}}
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--serve", job],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "TF_CONFIG": json.dumps(config)},
            text=True,
        )

    def say(self, word: str) -> set[str]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{word}\n")
        self._process.stdin.flush()
        return set(json.loads(self._process.stdout.readline()))

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- the coordinator ----------------------------------------------------------------------------------------


def measure() -> tuple[dict[str, set[str]], list[str]]:
    """Returns the files by process, and the shortest stack from ``schedule`` to the worker's socket."""
    cluster = {job: [f"127.0.0.1:{_free_port()}"] for job in ("chief", "worker", "ps")}
    config = {"cluster": cluster, "task": {"type": "chief", "index": 0}}
    os.environ["TF_CONFIG"] = json.dumps(config)
    recorder = Recorder()
    recorder.install()
    with contextlib.ExitStack() as stack:
        tasks = {job: Task(job, cluster) for job in ("worker", "ps")}
        for task in tasks.values():
            stack.callback(task.close)
        import replicax as rx

        strategy = rx.ParameterServerStrategy(rx.cluster_resolver.TFConfigClusterResolver())
        coordinator = stack.enter_context(rx.coordinator.ClusterCoordinator(strategy))
        with strategy.scope():
            variable = rx.Variable(np.zeros(8, np.float32))

        def step(x: Any) -> Any:
            variable.assign_sub(0.1 * x)
            return variable.value.sum()

        x = np.ones(8, np.float32)
        for _ in range(_NUM_WARM):
            coordinator.schedule(step, args=(x,)).fetch()
        runs, ways = [], []
        for _ in range(_NUM_MEASURED):
            for task in tasks.values():
                task.say("begin")
            recorder.begin()
            coordinator.schedule(step, args=(x,)).fetch()
            recorder.end()
            entered = {job: task.say("end") for job, task in tasks.items()}
            runs.append({"coordinator": recorder.files, **entered})
            ways.append(recorder.way or [])
    files = {process: set.intersection(*(run[process] for run in runs)) for process in runs[0]}
    return files, min(ways, key=len)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def calls_between(way: list[str]) -> list[str]:
    """The functions of the coordinator between ``schedule`` and the connection's transport."""
    begin = next((i for i, each in enumerate(way) if each.endswith("ClusterCoordinator.schedule")), -1)
    return [each for each in way[begin + 1 :] if each.startswith("_ps/coordinator/")]


def show(files: dict[str, set[str]], way: list[str]) -> None:
    everywhere = set().union(*files.values())
    for path in sorted(everywhere):
        print(f"{path:48}", *(f"{process:12}" if path in files[process] else " " * 12 for process in files))
    print()
    for process, entered in files.items():
        print(f"{process:12} {len(entered):3} files")
    print(f"{'together':12} {len(everywhere):3} files")
    between = calls_between(way)
    print(f"\nbetween schedule and the worker's socket: {len(between)} calls of the coordinator")
    for each in way:
        print(f"  {'*' if each in between else ' '} {each}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", choices=("worker", "ps"), help="be this task (for the benchmark itself)")
    job = parser.parse_args().serve
    if job is None:
        show(*measure())
    else:
        serve(job)

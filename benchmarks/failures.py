"""Trains through failures: ``kill -9`` of one of three workers every 20 s, for three minutes. How many rows does each
contestant train on in a minute, and how far are the weights then from those of an undisturbed run of the same number
of steps?

    make bench-failures
    python benchmarks/failures.py --torchft PYTHON_WITH_TORCHFT

All train the same network from the same weights on the same batches (scikit-learn's digits, 96 rows, SGD), on this
host's loopback. The contestants:

- replicax, survivors: ``fault_tolerance=True`` with ``--max-restarts``. The others finish the step, and a replacement
  takes the dead worker's place. If nobody is left, all restart from the last checkpoint.
- replicax, save on failure: a survivor saves the last step, and all restart.
- replicax, restarts: all restart from the last checkpoint.
- torchft: each worker is a replica group under a ``torchrun --max-restarts`` of its own, as torchft's documentation has
  it. The others go on without the dead worker's rows, and its replacement gets the weights from one of them.
- torchrun: DistributedDataParallel, one ``torchrun --max-restarts``, all restart from the last checkpoint.

The victims are workers 0, 1, 2, 0, ... Rows count once: steps that are repeated after a restart do not count again, and
rows that a step left out do not count. Time begins with the first step. The undisturbed run is one of the same
contestant, and ends at the last step that was compared or after twice the time. Distances are taken at the last step
that both have written; those of the weights are relative to the way that they have gone in the undisturbed run.

``torchft.lock`` is torchft's environment. Its settings are gloo, ``ProcessGroupGloo`` with 5 s and ``PGTransport``, as in
its ``train_ddp.py``, and the lighthouse as in its README, with two changes. The least number of replicas is a majority. The
limit of the heartbeats is 1 s, ten times their interval, instead of 5 s: after a death the others wait for this time.
``failures_torchft.py`` says what else differs.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import platform
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

import numpy as np

import failures_training as training

HERE = Path(__file__).parent
MOST_COMPARED = 8
START_LIMIT_S, PAUSE_LIMIT_S, END_S = 120.0, 120.0, 20.0
MAX_RESTARTS = "1000"
REPLICAX, TORCHFT, TORCHRUN = "replicax, ", "torchft", "torchrun, DDP"


class NotTrainedError(Exception):
    """A job did not train, or did not train again."""


@dataclass(frozen=True)
class Point:
    """How far a job was at a time: steps of the training, and rows that they trained on."""

    at: float
    num_steps: int
    num_rows: int


@dataclass(frozen=True)
class Run:
    """What one job did.

    Attributes:
      rows_per_minute: From its first step to its end.
      last: The last point.
      pauses: For each kill, the longest time until the next one in which nothing was trained.
      weights: By step; with kills those of at most ``MOST_COMPARED`` steps, the last one among them.
    """

    rows_per_minute: float
    last: Point
    pauses: Sequence[float]
    weights: Mapping[int, Sequence[np.ndarray]]


@dataclass
class Contestant:
    """What is measured.

    Attributes:
      start: Starts the processes of a job.
      num_failed: The number of jobs that did not train, or did not train again.
    """

    start: Callable[[Job], None]
    runs: list[Run] = field(default_factory=list)
    undisturbed: Run | None = None
    num_failed: int = 0


@final
class Job:
    """The processes of one contestant, which begin in a folder of their own and end with the ``with``."""

    def __init__(self, folder: Path, model: str):
        self.folder, self._model = folder, model
        self._processes: list[subprocess.Popen] = []
        self._points: dict[Path, int] = {}

    def start(self, command: Sequence[str], **environment: str) -> None:
        ours = {
            training.FOLDER: str(self.folder),
            training.MODEL: self._model,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        kept = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        with open(self.folder / f"log-{len(self._processes)}", "wb") as log:
            process = subprocess.Popen(
                command, env={**kept, **ours, **environment}, stdout=log, stderr=log, start_new_session=True
            )
        self._processes.append(process)

    def points(self) -> list[Point]:
        """The points of all workers by time; those at which the job was farther than before."""
        points: list[Point] = []
        for path in self.folder.glob("progress-*"):
            for line in path.read_text().split("\n")[:-1]:
                at, num_steps, num_rows = line.split()
                points.append(Point(float(at), int(num_steps), int(num_rows)))
        ahead: list[Point] = []
        for point in sorted(points, key=lambda each: each.at):
            if not ahead or point.num_rows > ahead[-1].num_rows:
                ahead.append(point)
        return ahead

    def victim(self, first: int) -> int | None:
        """The process of the first worker from ``first`` on that trains."""
        for number in range(first, first + training.NUM_WORKERS):
            for path in self.folder.glob(f"progress-{number % training.NUM_WORKERS}-*"):
                process = int(path.name.rpartition("-")[2])
                if path.stat().st_size and _is_worker(process):
                    return process
        return None

    def check(self) -> None:
        """Raises an error if a process that should run as long as the job has ended."""
        for number, process in enumerate(self._processes):
            if process.poll() is not None:
                raise NotTrainedError(f"{process.args} ended with {process.returncode}:\n{self.log(number)}")

    def log(self, number: int = -1) -> str:
        number %= len(self._processes)
        return "\n".join((self.folder / f"log-{number}").read_text(errors="replace").splitlines()[-30:])

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        deadline = time.monotonic() + END_S
        for process in reversed(self._processes):
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for path in self.folder.glob("progress-*"):
            worker = int(path.name.rpartition("-")[2])
            if _is_worker(worker):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(worker, signal.SIGKILL)


def _is_worker(process: int) -> bool:
    """True if it runs; another program may have its number by now."""
    try:
        return "failures_" in Path(f"/proc/{process}/cmdline").read_text()
    except OSError:
        return False


def main() -> None:
    """Prints a table for each model."""
    arguments = _arguments()
    contestants = _contestants(arguments)
    print(", ".join(_versions(arguments.torchft)), flush=True)
    for model in [arguments.model] if arguments.model else training.SIZES:
        for contestant in contestants.values():
            contestant.runs, contestant.undisturbed, contestant.num_failed = [], None, 0
        names = [*contestants]
        for number in range(arguments.rounds):
            for name in names[number % len(names) :] + names[: number % len(names)]:
                _measure(name, contestants[name], model, arguments.duration, arguments.every)
        for name, contestant in contestants.items():
            if contestant.runs:
                _measure(name, contestant, model, arguments.duration, None)
        report(model, contestants, arguments)


def _measure(name: str, contestant: Contestant, model: str, duration_s: float, every_s: float | None) -> None:
    """Runs one more job, with kills, or without until it has all weights of those with kills."""
    compared = set[int]().union(*(run.weights for run in contestant.runs)) if every_s is None else set()
    try:
        with tempfile.TemporaryDirectory() as name_of_folder:
            folder = Path(name_of_folder)
            np.savez(folder / training.DATA, **_digits())
            with Job(folder, model) as job:
                contestant.start(job)
                run = _train(job, duration_s, every_s, compared)
    except NotTrainedError as error:
        contestant.num_failed += 1
        print(f"{name}: {error}", file=sys.stderr)
        return
    if every_s is None:
        contestant.undisturbed = run
    else:
        contestant.runs.append(run)
    print(
        f"  {model}, {name}, {'no kills' if every_s is None else 'kills'}: {run.rows_per_minute:,.0f} rows per minute",
        flush=True,
    )


def _digits() -> dict[str, np.ndarray]:
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    return {"images": (images[order] / 16).astype(np.float32), "labels": labels[order].astype(np.int64)}


def _train(job: Job, duration_s: float, every_s: float | None, compared: set[int]) -> Run:
    _wait(job, START_LIMIT_S, lambda: bool(job.points()))
    began = job.points()[0].at
    kills: list[float] = []
    if every_s is None:
        last = training.weights_path(job.folder, max(compared, default=0))
        _wait(job, 2 * duration_s, last.exists, is_error=False)
    else:
        for number in itertools.count():
            due = began + every_s * (number + 1)
            if due >= began + duration_s:
                break
            _wait(job, due - time.monotonic(), lambda: False, is_error=False)
            _wait(job, PAUSE_LIMIT_S, lambda first=number: job.victim(first) is not None)
            victim = job.victim(number)
            if victim is None or time.monotonic() >= began + duration_s:
                break
            kills.append(time.monotonic())
            os.kill(victim, signal.SIGKILL)
        _wait(job, began + duration_s - time.monotonic(), lambda: False, is_error=False)
    ended = time.monotonic()
    points = [point for point in job.points() if point.at <= ended]
    ends = [*kills[1:], ended] if kills else []
    return Run(
        rows_per_minute=60 * points[-1].num_rows / (ended - began),
        last=points[-1],
        pauses=[_longest_pause(points, *both) for both in zip(kills, ends, strict=True)],
        weights=_weights(job.folder, compared),
    )


def _wait(job: Job, limit_s: float, is_true: Callable[[], bool], is_error: bool = True) -> None:
    deadline = time.monotonic() + limit_s
    while not is_true():
        job.check()
        if time.monotonic() >= deadline:
            if is_error:
                raise NotTrainedError(f"a job does not train:\n{job.log()}")
            return
        time.sleep(0.05)


def _longest_pause(points: Sequence[Point], since: float, until: float) -> float:
    times = [since, *(point.at for point in points if since < point.at < until), until]
    return max(after - before for before, after in itertools.pairwise(times))


def _weights(folder: Path, compared: set[int]) -> dict[int, list[np.ndarray]]:
    """Those of the compared steps; if there are none, of steps that are spread over the run, the last one among them."""
    written = sorted(int(path.stem.rpartition("-")[2]) for path in folder.glob("weights-*.npz"))
    spread = written[:: -max(1, len(written) // MOST_COMPARED)][:MOST_COMPARED]
    weights = {}
    for step in compared.intersection(written) if compared else spread:
        with np.load(training.weights_path(folder, step)) as file:
            weights[step] = [file[name] for name in file.files]
    return weights


# --- the contestants ------------------------------------------------------------------------------------


def _contestants(arguments: argparse.Namespace) -> dict[str, Contestant]:
    contestants = {
        f"{REPLICAX}survivors": Contestant(lambda job: _launch(job, "survivors")),
        f"{REPLICAX}save on failure": Contestant(lambda job: _launch(job, "save_on_failure")),
        f"{REPLICAX}restarts": Contestant(lambda job: _launch(job, "restarts")),
    }
    if python := arguments.torchft:
        contestants[TORCHFT] = Contestant(lambda job: _torchft(job, python, arguments))
        contestants[TORCHRUN] = Contestant(lambda job: _torchrun(job, python))
    if arguments.only:
        contestants = {name: each for name, each in contestants.items() if arguments.only in name}
    return contestants


def _launch(job: Job, mode: str) -> None:
    command = [sys.executable, "-m", "replicax", "launch", "--plain", "--workers", str(training.NUM_WORKERS)]
    command += ["--devices-per-worker", "1", "--max-restarts", MAX_RESTARTS]
    command += ["--checkpoint-dir", str(job.folder / "checkpoints"), str(HERE / "failures_replicax.py"), mode]
    job.start(command)


def _torchft(job: Job, python: str, arguments: argparse.Namespace) -> None:
    port, *others = _free_ports(1 + training.NUM_WORKERS)
    lighthouse = [str(Path(python).parent / "torchft_lighthouse"), "--bind", f"127.0.0.1:{port}"]
    lighthouse += ["--quorum_tick_ms", "100", "--join_timeout_ms", "10000"]
    lighthouse += ["--min_replicas", str(arguments.min_replicas)]
    job.start([*lighthouse, "--heartbeat_timeout_ms", str(arguments.heartbeat_timeout_ms)], RUST_LOG="error")
    for number, group_port in enumerate(others):
        command = [python, "-m", "torch.distributed.run", "--nnodes", "1", "--nproc-per-node", "1"]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(group_port)]
        command += ["--max-restarts", MAX_RESTARTS, "--monitor-interval", "0.1"]
        command += [str(HERE / "failures_torchft.py"), "--min-replicas", str(arguments.min_replicas)]
        job.start(
            [*command, "--gloo-timeout", str(arguments.gloo_timeout), "--timeout", str(arguments.timeout)],
            REPLICA_GROUP_ID=str(number),
            NUM_REPLICA_GROUPS=str(training.NUM_WORKERS),
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{port}",
            RUST_LOG="error",  # otherwise it writes several lines for each step
        )


def _torchrun(job: Job, python: str) -> None:
    command = [python, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(training.NUM_WORKERS), "--max-restarts", MAX_RESTARTS]
    command += ["--monitor-interval", "0.1", str(HERE / "failures_torch.py")]
    job.start(command, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1")  # gloo would ask for addresses of dead workers


def _free_ports(num_ports: int) -> list[int]:
    with contextlib.ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(num_ports)]
        for bound in sockets:
            bound.bind(("127.0.0.1", 0))
        return [bound.getsockname()[1] for bound in sockets]


# --- what is printed ------------------------------------------------------------------------------------


def _versions(torchft: str | None) -> list[str]:
    named = _installed(sys.executable, ["replicax", "jax", "numpy"])
    if torchft:
        named += _installed(torchft, ["torch", "torchft"])
    return [*named, f"Python {platform.python_version()}", f"{os.cpu_count()} cores"]


def _installed(python: str, names: Sequence[str]) -> list[str]:
    program = (
        f"import importlib.metadata as m; print(*(n + ' ' + m.version(n) for n in {names!r}), sep='\\n')"
    )
    return subprocess.run(
        [python, "-c", program], check=True, capture_output=True, text=True
    ).stdout.splitlines()


def report(model: str, contestants: Mapping[str, Contestant], arguments: argparse.Namespace) -> None:
    """Prints a line for each contestant: medians of its runs, and [lowest–highest]."""
    images, labels = _digits().values()
    print(
        f"\n{model}, {training.NUM_WORKERS} workers, kill -9 every {arguments.every:g} s for {arguments.duration:g} s, "
        f"{arguments.rounds} rounds"
    )
    columns = ("1,000 rows/min", "undisturbed", "pause s", "rows left out", "distance", "loss − undisturbed")
    print(f"  {'':26}{''.join(f'{column:>26}' for column in columns)}")
    for name, each in contestants.items():
        rates = [run.rows_per_minute / 1000 for run in each.runs]
        left_out = [100 * (1 - run.last.num_rows / (run.last.num_steps * training.ROWS)) for run in each.runs]
        pauses = [pause for run in each.runs for pause in run.pauses]
        undisturbed, distances, losses = "–", "–", "–"
        if each.undisturbed is not None:
            undisturbed = f"{each.undisturbed.rows_per_minute / 1000:,.0f}"
            pairs = [
                _distances(max(steps), run, each.undisturbed, model, images, labels)
                for run in each.runs
                if (steps := run.weights.keys() & each.undisturbed.weights.keys())
            ]
            distances = _cell([distance for distance, _ in pairs], ".1e")
            losses = _cell([loss for _, loss in pairs], "+.1e")
        cells = (
            _cell(rates, ",.0f"),
            undisturbed,
            _cell(pauses, ".2f"),
            _cell(left_out, ".1f") + " %",
            distances,
            losses,
        )
        print(f"  {name:26}{''.join(f'{cell:>26}' for cell in cells)}")
        if each.num_failed:
            print(f"  {'':26}{each.num_failed} jobs did not train, or did not train again")


def _distances(
    step: int, run: Run, undisturbed: Run, model: str, images: np.ndarray, labels: np.ndarray
) -> tuple[float, float]:
    """Of the weights, relative to the way that they have gone, and of the losses."""
    weights, expected = run.weights[step], undisturbed.weights[step]
    start = training.initial_weights(model)
    loss, expected_loss = (training.mean_loss(list(each), images, labels) for each in (weights, expected))
    return _norm(weights, expected) / _norm(expected, start), loss - expected_loss


def _norm(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    squares = [np.sum((a.astype(np.float64) - b) ** 2) for a, b in zip(some, others, strict=True)]
    return float(np.sqrt(sum(squares)))


def _cell(values: Sequence[float], form: str) -> str:
    if not values:
        return "–"
    median = statistics.median(values)
    return f"{median:{form}} [{min(values):{form}}–{max(values):{form}}]"


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--torchft", metavar="PYTHON", help="a Python that has torch 2.13 and torchft 0.2")
    parser.add_argument("--duration", type=float, default=180, help="seconds of training of a job (180)")
    parser.add_argument("--every", type=float, default=20, help="seconds from one kill to the next (20)")
    parser.add_argument("--rounds", type=int, default=1, help="jobs with kills of each contestant (1)")
    parser.add_argument("--model", choices=training.SIZES, help="one model")
    parser.add_argument("--only", metavar="NAME", help="the contestants whose names have this part")
    parser.add_argument(
        "--heartbeat-timeout-ms", type=int, default=1000, help="of torchft's lighthouse (1000)"
    )
    parser.add_argument("--min-replicas", type=int, default=2, help="of torchft: a majority (2), or 1")
    parser.add_argument("--gloo-timeout", type=float, default=5, help="seconds, of torchft's sums (5)")
    parser.add_argument("--timeout", type=float, default=30, help="seconds, of torchft's manager (30)")
    return parser.parse_args()


if __name__ == "__main__":
    main()

"""Measures groups that never wait for each other, ``rx.experimental.LocalUpdates``, with real processes and a real server.

    python benchmarks/local_updates.py                # all rows, about half an hour on two cores
    python benchmarks/local_updates.py --only step    # one row

- ``equal``: groups of 7, 7, 1 and 1 rows that exchange at each step and wait, beside one device: the largest difference
  of a parameter after 100 steps, divided by the largest parameter.
- ``kill``: ``kill -9`` of one of three groups: the 99th percentile of the times between two steps of the others, in the
  20 s after it, divided by that of the 60 s before. Then the group starts again, and the next trial kills another one.
- ``server``: ``kill -9`` of the only server, which starts again after 5 s from a snapshot: the longest time between two
  steps of a group, the time until a new round closes, and the largest rise of the loss, averaged over a second and all
  groups, above its lowest value since 5 s before the kill.
- ``step``: what ``groups.step`` takes in a loop, and the callback in ``fit``: seconds on the clock, and of the processor in
  this thread, and what the training step after it takes longer than usual.
- ``wire``: bytes of a group in a step, both ways, which a relay before the server counts, beside those of an all-reduce of
  float32 over a ring of as many processes: 2 (n - 1) / n values sent, and as many received. The loopback's own counter
  checks that figure with gloo; other programs on the machine count there too.
- ``quality``: a language model of 0.13 M parameters in four groups beside synchronous training: the loss of held-out
  bytes. ``local_updates_quality.py`` says what it trains. It takes an hour or more.
- ``lines``: the code lines of the feature, without blank lines, comments and docstrings.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import io
import itertools
import json
import os
import queue
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import tokenize
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

os.environ["KERAS_BACKEND"] = "jax"
HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import workers
from counted_bytes import CountedBytes

LIMIT_S = 600.0
GROUP = HERE / "local_updates_group.py"
SMALL = [64, 256, 256, 10]  # the widths of an MLP of 0.08 M parameters
PAUSE_S = 0.015  # after each step: three groups have two cores


@dataclass(frozen=True)
class Options:
    """The options of the command line; ``num_rounds`` is None for what suits each row."""

    num_rounds: int | None
    is_quick: bool
    lengths: Sequence[int]
    rates: Sequence[float]
    num_seeds: int

    def rounds(self, usual: int) -> int:
        return self.num_rounds or (1 if self.is_quick else usual)


def print_row(
    what: str, values: Sequence[float], unit: str, bar: float | None = None, *, at_least: bool = False
) -> None:
    """Prints a figure: the median of several values, their spread, and whether it meets its bar."""
    median = statistics.median(values)
    spread = f"{min(values):.4g} to {max(values):.4g}, {len(values)} values"
    line = f"  {what:58} {median:10.4g} {unit:9} ({spread})"
    if bar is not None:
        is_met = median >= bar if at_least else median <= bar
        line += f"  bar {'>=' if at_least else '<='} {bar:g}: {workers.replication(is_met)}"
    print(line, flush=True)


# --- equal ----------------------------------------------------------------------------------------------


def equal(options: Options) -> None:
    """Groups in threads of this process."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    import jax
    import jax.numpy as jnp
    import keras
    import numpy as np

    import replicax as rx

    rows, num_steps = (7, 7, 1, 1), 10 if options.is_quick else 100

    @jax.jit
    def trained(params: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            return jnp.mean((jnp.tanh(x @ params["w"] + params["b"]) @ params["v"] - y) ** 2)

        return jax.tree.map(lambda w, g: w - 0.1 * g, params, jax.grad(loss)(params))

    def differences(seed: int) -> float:
        draw = np.random.default_rng(seed)
        x, y = (draw.normal(size=(num_steps, sum(rows), width)).astype(np.float32) for width in (16, 4))
        first = {
            name: jnp.asarray(draw.normal(size=shape) / 4, jnp.float32)
            for name, shape in (("w", (16, 32)), ("b", (32,)), ("v", (32, 4)))
        }

        def train(groups: rx.experimental.LocalUpdates) -> Any:
            before = sum(rows[: groups.index])
            mine = slice(before, before + rows[groups.index])
            params = groups.attach(first)
            for step in range(num_steps):
                groups.step(trained(params, x[step, mine], y[step, mine]), tokens=rows[groups.index])
                params = groups.wait(LIMIT_S)
            return groups.finish(LIMIT_S)

        with rx.Server({"ps": ["localhost:0"]}, "ps", 0) as server:
            os.environ["REPLICAX_SYNCERS"] = server.target.removeprefix("grpc://")
            made = []
            for index in range(len(rows)):
                os.environ["REPLICAX_GROUP"] = f"{index}/{len(rows)}"
                sgd = keras.optimizers.SGD(1.0)
                made.append(rx.experimental.LocalUpdates(1, sgd, fragments=2, quorum=len(rows)))
            with ThreadPoolExecutor(len(rows)) as pool:
                results = list(pool.map(train, made))
        del os.environ["REPLICAX_GROUP"], os.environ["REPLICAX_SYNCERS"]
        one = first
        for step in range(num_steps):
            one = trained(one, x[step], y[step])
        largest = max(float(jnp.abs(each).max()) for each in one.values())
        return max(
            float(jnp.abs(result[name] - one[name]).max()) / largest for result in results for name in one
        )

    print(f"\nequal: every=1, SGD(1), groups of {rows} rows, beside one device after {num_steps} steps")
    values = [differences(seed) for seed in range(options.rounds(3))]
    print_row("largest difference / largest parameter", values, "", 1e-6)


# --- jobs -----------------------------------------------------------------------------------------------


@final
class Job:
    """Groups and a server in processes of their own. As a context it ends them all.

    Args:
      num_groups: The number of groups.
      setting: What they do: the arguments of a function of ``local_updates_group.py``.
      is_counted: True to count bytes.
      has_snapshots: True to give the server a folder for them.

    Attributes:
      counted: The relay that counts bytes; None without.
    """

    def __init__(
        self,
        num_groups: int,
        setting: dict[str, Any],
        *,
        is_counted: bool = False,
        has_snapshots: bool = False,
    ):
        self._has_snapshots = has_snapshots
        self._held = contextlib.ExitStack()
        self.folder = Path(self._held.enter_context(tempfile.TemporaryDirectory()))
        self.num_groups, self._setting = num_groups, setting
        (self._address,) = workers.free_addresses(1)
        self.counted = CountedBytes(self._address) if is_counted else None
        self._running: dict[str, subprocess.Popen[bytes]] = {}

    def start_server(self) -> None:
        cluster = json.dumps({"ps": [self._address]})
        command = ["-m", "replicax", "server", "--job", "ps", "--index", "0", "--cluster", cluster]
        if self._has_snapshots:
            command += ["--snapshot-dir", str(self.folder / "snapshots"), "--snapshot-interval", "3"]
        self._start("server", command, {})

    def start_group(self, index: int) -> None:
        address = self._address if self.counted is None else self.counted.address
        more = {"REPLICAX_GROUP": f"{index}/{self.num_groups}", "REPLICAX_SYNCERS": address}
        self._start(self.group(index), [str(GROUP), json.dumps(self._setting)], more)

    @staticmethod
    def group(index: int) -> str:
        return f"group {index}"

    def _start(self, name: str, arguments: Sequence[str], more: dict[str, str]) -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", **more}
        with (self.folder / f"{name}.log").open("a") as log:
            self._running[name] = subprocess.Popen(
                [sys.executable, *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
            )

    def kill(self, name: str) -> float:
        """``kill -9``. Returns when."""
        process = self._running.pop(name)
        at = time.monotonic()
        process.send_signal(signal.SIGKILL)
        process.wait()
        return at

    def steps(self, index: int) -> list[tuple[float, int, float]]:
        """The steps of a group: when it ended, the version, and the loss."""
        path = self.folder / f"steps-{index}"
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [(float(at), int(version), float(loss)) for at, version, loss in map(str.split, lines)]

    def wait(self, is_true: Callable[[], bool]) -> None:
        """Waits until something is true of a job that trains.

        Raises:
          SystemExit: A process has ended, or it takes too long.
        """
        deadline = time.monotonic() + LIMIT_S
        while not is_true():
            ended = [name for name, process in self._running.items() if process.poll() is not None]
            if ended or time.monotonic() > deadline:
                logs = {path.name: path.read_text()[-2000:] for path in self.folder.glob("*.log")}
                raise SystemExit(f"a job does not train: {ended}\n{json.dumps(logs, indent=1)}")
            time.sleep(0.25)

    def output(self, name: str) -> dict[str, Any]:
        """Waits until a process ends. Returns what it has written."""
        code = self._running.pop(name).wait(LIMIT_S)
        lines = (self.folder / f"{name}.log").read_text().splitlines()
        found = [line for line in lines if line.startswith("{")]
        if code or not found:
            raise SystemExit(f"{name} ended with {code}:\n" + "\n".join(lines[-40:]))
        return json.loads(found[-1])

    def __enter__(self) -> Job:
        self.start_server()
        for index in range(self.num_groups):
            self.start_group(index)
        return self

    def __exit__(self, *error: object) -> None:
        for process in self._running.values():
            process.kill()
        for process in self._running.values():
            process.wait()
        if self.counted is not None:
            self.counted.close()
        self._held.close()


def beside_others(widths: Sequence[int], **options: Any) -> dict[str, Any]:
    """The setting of groups that train until they are killed."""
    return {
        "task": "beside others",
        "folder": "",
        "widths": widths,
        "every": 30,
        "pause_s": PAUSE_S,
        **options,
    }


@contextlib.contextmanager
def training(num_groups: int, setting: dict[str, Any], **options: bool) -> Iterator[Job]:
    """A job whose groups train, and have exchanged."""
    job = Job(num_groups, setting, **options)
    setting["folder"] = str(job.folder)
    with job:
        job.wait(lambda: all((job.steps(each) or [(0, 0, 0)])[-1][1] >= 5 for each in range(num_groups)))
        yield job


def gaps(job: Job, index: int, since: float, until: float) -> list[float]:
    """The times between two steps of a group that ended in an interval."""
    ends = [at for at, *_ in job.steps(index)]
    return [b - a for a, b in itertools.pairwise(ends) if since < b <= until] or [until - since]


def p99(values: Sequence[float]) -> float:
    return sorted(values)[min(len(values) - 1, 99 * len(values) // 100)]


# --- kill and server ------------------------------------------------------------------------------------


def kill(options: Options) -> None:
    num_groups, before_s, after_s = 3, 60.0, 20.0
    if options.is_quick:
        before_s, after_s = 6.0, 4.0
    ratios, p99_before, p99_after, longest = [], [], [], []
    with training(num_groups, beside_others(SMALL, fragments=2, compression="int8")) as job:
        for number in range(options.rounds(5)):
            victim = (num_groups - 1 - number) % num_groups
            others = [each for each in range(num_groups) if each != victim]
            time.sleep(before_s)
            at = job.kill(job.group(victim))
            time.sleep(after_s)
            job.wait(lambda: True)  # they live
            before = [gap for each in others for gap in gaps(job, each, at - before_s, at)]
            after = [gap for each in others for gap in gaps(job, each, at, at + after_s)]
            p99_before.append(1e3 * p99(before))
            p99_after.append(1e3 * p99(after))
            ratios.append(p99(after) / p99(before))
            longest.append(1e3 * max(after))
            if number + 1 == options.rounds(5):
                break
            have, version = len(job.steps(victim)), max(each[1] for each in job.steps(others[0])[-1:])
            job.start_group(victim)
            job.wait(lambda v=victim, have=have: len(job.steps(v)) > have + 50)
            job.wait(lambda v=victim, version=version: job.steps(v)[-1][1] > version)
    print(
        f"\nkill: one of {num_groups} groups, MLP {'-'.join(map(str, SMALL))}, every 30 steps, int8, steps with a pause of 15 ms"
    )
    print_row(f"p99 between two steps, {before_s:g} s before", p99_before, "ms")
    print_row(f"p99 between two steps, {after_s:g} s after", p99_after, "ms")
    print_row("longest time between two steps after", longest, "ms")
    print_row("p99 after / before", ratios, "times", 1.5)


def server(options: Options) -> None:
    # As long before as in the measurement: the largest of more noisy seconds would be larger.
    num_groups, before_s, away_s, after_s = 3, 30.0, 5.0, 20.0
    if options.is_quick:
        before_s, after_s = 8.0, 12.0
    longest_before, longest, back, rises_before, rises, rounds = [], [], [], [], [], []
    setting = beside_others(SMALL, fragments=2, compression="int8")
    with training(num_groups, setting, has_snapshots=True) as job:
        everyone = range(num_groups)
        for _ in range(options.rounds(3)):
            time.sleep(before_s)
            at = job.kill("server")
            time.sleep(away_s)
            started = time.monotonic()
            job.start_server()
            time.sleep(after_s)
            job.wait(lambda: True)  # they live
            until = time.monotonic()
            longest_before.append(1e3 * max(max(gaps(job, each, at - before_s, at)) for each in everyone))
            longest.append(1e3 * max(max(gaps(job, each, at, until)) for each in everyone))
            rises_before.append(_rise(job, at - before_s, at))
            rises.append(_rise(job, at - 5.0, until))
            adopted = [each for index in everyone for each in _new_versions(job, index, started, until)]
            back.append(min(adopted, default=float("inf")) - started)
            rounds.append(len(adopted) / num_groups)
    print(
        f"\nserver: away for {away_s:g} s, then back from its last snapshot (every 3 s); the groups as in `kill`"
    )
    print_row("longest time between two steps, before", longest_before, "ms")
    print_row(
        f"longest time between two steps, from the kill on ({away_s + after_s:g} s)", longest, "ms", 1000.0
    )
    print_row("from the start of the server to the first new version", back, "s")
    print_row(f"new versions of a group in {after_s:g} s", rounds, "", 1, at_least=True)
    print_row(f"largest rise of the loss, {before_s:g} s before", rises_before, "%")
    print_row("largest rise of the loss, from 5 s before the kill on", rises, "%", 1.0)


def _new_versions(job: Job, index: int, since: float, until: float) -> list[float]:
    """When a group adopted another version."""
    steps = [each for each in job.steps(index) if since < each[0] <= until]
    return [at for (_, before, _), (at, version, _) in itertools.pairwise(steps) if version != before]


def _rise(job: Job, since: float, until: float) -> float:
    """The largest rise of the loss above what it was, in percent."""
    by_second: dict[int, list[float]] = {}
    for index in range(job.num_groups):
        for at, _, loss in job.steps(index):
            if since <= at < since + int(until - since):
                by_second.setdefault(int(at - since), []).append(loss)
    curve = [statistics.fmean(by_second[second]) for second in sorted(by_second)]
    lowest = itertools.accumulate(curve, min)
    rises = [now / low - 1 for now, low in zip(curve, lowest, strict=True)]
    return 100 * max(rises, default=float("nan"))


# --- step -----------------------------------------------------------------------------------------------

SIZES = {
    "4 MB": (512, 30),
    "64 MB": (2048, 60),
}  # the widths of four matrices, and steps between two exchanges
STEP_BARS_MS = {"loop": 1.0, "fit": 20.0}


def step(options: Options) -> None:
    print("\nstep: the thread that trains, one group, one fragment, float32; a pause of 5 ms after each step")
    for size, (width, every) in SIZES.items():
        for task, bar in STEP_BARS_MS.items():
            if options.is_quick:
                width, every = 512, 30
            is_large = size != "4 MB"
            if is_large and task == "fit" and not options.is_quick:
                continue  # it has no bar, and takes minutes
            num_exchanges = 4 if options.is_quick else 4 if is_large else 20
            setting = {
                "task": task,
                "width": width,
                "every": every,
                "num_exchanges": num_exchanges,
                "pause_s": 0.005,
            }
            reports = [_reported(setting) for _ in range(1 if is_large else options.rounds(3))]
            _print_steps(f"{size}, {task}", reports, None if is_large else bar)


def _reported(setting: dict[str, Any]) -> dict[str, Any]:
    with Job(1, setting) as job:
        return job.output(job.group(0))


def _print_steps(title: str, reports: Sequence[dict[str, Any]], bar: float | None) -> None:
    subtractions = [1e3 * statistics.median(each["subtractions"]) for each in reports]
    print(
        f"  -- {title}: {reports[0]['megabytes']:.3g} MB; one jitted subtraction {statistics.median(subtractions):.3g} ms"
    )
    calls = [each["calls"][20:] for each in reports]  # warm
    usual = [statistics.median(each[4] for each in of_one if not each[0] and not each[1]) for of_one in calls]
    kinds = {
        "between exchanges": (False, False),
        "pushes": (True, False),
        "adopts": (False, True),
        "both": (True, True),
    }
    for name, kind in kinds.items():
        of_kind = [[each for each in of_one if (each[0], each[1]) == kind] for of_one in calls]
        if not all(of_kind):
            continue
        limit = None if bar is None else 0.05 if kind == (False, False) else bar
        if limit is not None and limit != 0.05 and "loop" in title:
            limit += statistics.median(subtractions)
        walls = [1e3 * statistics.median(each[2] for each in of_one) for of_one in of_kind]
        print_row(f"{name}: median", walls, "ms", limit)
        print_row(f"{name}: p99", [1e3 * p99([each[2] for each in of_one]) for of_one in of_kind], "ms")
        threads = [1e3 * statistics.median(each[3] for each in of_one) for of_one in of_kind]
        print_row(f"{name}: processor time of the thread, median", threads, "ms")
        if kind != (False, False):
            slower = [
                1e3 * (statistics.median(each[4] for each in of_one) - often)
                for of_one, often in zip(of_kind, usual, strict=True)
            ]
            print_row(f"{name}: the next training step takes longer by", slower, "ms")


# --- wire -----------------------------------------------------------------------------------------------

WIRED = [64, 960, 960, 10]  # 4 MB of float32


def wire(options: Options) -> None:
    num_groups, num_steps = 4, 60 if options.is_quick else 300
    num_parameters = sum((a + 1) * b for a, b in itertools.pairwise(WIRED))
    both_ways = 2 * 2 * (num_groups - 1) / num_groups * 4 * num_parameters
    up, down = [], []
    with training(num_groups, beside_others(WIRED, compression="int8"), is_counted=True) as job:
        counted = job.counted
        assert counted is not None

        def now() -> tuple[int, int, int]:
            return (
                sum(len(job.steps(each)) for each in range(num_groups)),
                counted.to_server,
                counted.from_server,
            )

        for _ in range(options.rounds(3)):
            first = now()
            job.wait(lambda first=first: now()[0] >= first[0] + num_groups * num_steps)
            passed = [after - before for before, after in zip(first, now(), strict=True)]
            up.append(passed[1] / passed[0])
            down.append(passed[2] / passed[0])
    print(
        f"\nwire: {num_groups} groups, {num_parameters} parameters, every 30 steps, 4 fragments, int8 up, float32 down"
    )
    print_row("to the server, per group and step", [each / 1e3 for each in up], "kB")
    print_row("from the server, per group and step", [each / 1e3 for each in down], "kB")
    print_row(f"an all-reduce of float32 over a ring of {num_groups}, both ways", [both_ways / 1e3], "kB")
    ratios = [both_ways / (a + b) for a, b in zip(up, down, strict=True)]
    print_row("times fewer", ratios, "times", 60.0, at_least=True)
    _all_reduced(num_groups, num_parameters, both_ways, 5 if options.is_quick else 50)


def _all_reduced(num_processes: int, num_parameters: int, both_ways: float, count: int) -> None:
    """Counts the bytes of an all-reduce with gloo on the loopback. Each is sent once, and received once."""
    if not Path("/proc/net/dev").exists():
        return
    setting = {"contestant": "replicax", "task": "all_reduce", "implementation": "RING"}
    contestant = workers.Contestant(sys.executable, "worker_replicax.py", setting, num_processes)
    running = workers.Workers(contestant)
    try:
        running.run(2, size=4 * num_parameters)
        before = _loopback_bytes()
        running.run(count, size=4 * num_parameters)
        per_process = 2 * (_loopback_bytes() - before) / (count + 1) / num_processes  # one is not timed
    finally:
        running.close()
    print_row(
        f"the same by the counter of the loopback, gloo, {num_processes} processes", [per_process / 1e3], "kB"
    )
    print_row("counted / computed", [per_process / both_ways], "times")


def _loopback_bytes() -> int:
    lines = Path("/proc/net/dev").read_text().splitlines()
    (loopback,) = [line for line in lines if line.strip().startswith("lo:")]
    return int(loopback.partition(":")[2].split()[0])


# --- quality --------------------------------------------------------------------------------------------

SYNCHRONOUS, GROUPS, WAITING = "synchronous", "groups", "groups that wait"


def quality(options: Options) -> None:
    """Runs of all seeds, two at once. The first rate is that of the groups."""
    lengths = [20, 40] if options.is_quick else sorted(options.lengths)
    rate = options.rates[0]
    longest = lengths[-1]
    runs = [(SYNCHRONOUS, longest, each, seed) for each in options.rates for seed in range(options.num_seeds)]
    runs += [(GROUPS, longest, rate, seed) for seed in range(options.num_seeds)]
    for length in reversed(lengths[:-1]):
        runs += [
            (name, length, rate, seed) for name in (SYNCHRONOUS, GROUPS) for seed in range(options.num_seeds)
        ]
    runs += [(WAITING, lengths[0], rate, seed) for seed in range(options.num_seeds)]
    start = time.monotonic()
    losses = _losses(runs)
    print(
        f"\nquality: 0.13 M parameters, 4 groups, int8, every 30 steps, learning rate {rate:g}; the loss of held-out bytes "
        f"({time.monotonic() - start:.0f} s)"
    )
    print(f"  {'steps':>6} {'seed':>4} {SYNCHRONOUS:>12} {GROUPS:>9} {'gap':>7}   {WAITING}")
    for length in lengths:
        for seed in range(options.num_seeds):
            one, other = losses[SYNCHRONOUS, length, rate, seed], losses[GROUPS, length, rate, seed]
            waiting = losses.get((WAITING, length, rate, seed))
            more = "" if waiting is None else f"{waiting:.4f} ({100 * (waiting / one - 1):+.1f} %)"
            print(
                f"  {length:6} {seed:4} {one:12.4f} {other:9.4f} {100 * (other / one - 1):+6.1f} %   {more}"
            )
    for seed in range(options.num_seeds):
        of_rates = {each: losses[SYNCHRONOUS, longest, each, seed] for each in options.rates}
        shown = ", ".join(f"{each:g}: {loss:.4f}" for each, loss in of_rates.items())
        gap = 100 * (losses[GROUPS, longest, rate, seed] / min(of_rates.values()) - 1)
        print(
            f"  seed {seed}, synchronous by learning rate ({shown}): gap to the best {gap:+.1f} %", flush=True
        )


Run = tuple[str, int, float, int]


def _losses(runs: Sequence[Run]) -> dict[Run, float]:
    """Carries out runs in two processes."""
    waiting: queue.SimpleQueue[Run] = queue.SimpleQueue()
    for run in runs:
        waiting.put(run)
    losses: dict[Run, float] = {}
    failures: list[str] = []

    def work() -> None:
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax"}
        command = [sys.executable, str(HERE / "local_updates_quality.py")]
        with (
            tempfile.TemporaryFile("w+") as errors,
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                env=environment,
                text=True,
            ) as process,
        ):
            assert process.stdin is not None
            assert process.stdout is not None
            with contextlib.suppress(queue.Empty):
                while not failures:
                    run = waiting.get_nowait()
                    print(
                        json.dumps(dict(zip(("contestant", "length", "rate", "seed"), run))),
                        file=process.stdin,
                        flush=True,
                    )
                    line = next((line for line in process.stdout if line.startswith("{")), "")
                    if not line:
                        errors.seek(0)
                        failures.append(errors.read()[-3000:])
                        return
                    losses[run] = json.loads(line)["loss"]
                    print(f"  {run}: {losses[run]:.4f}", file=sys.stderr, flush=True)

    threads = [threading.Thread(target=work) for _ in range(min(2, len(runs)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise SystemExit(failures[0])
    return losses


# --- lines ----------------------------------------------------------------------------------------------


def lines(options: Options) -> None:
    del options
    folder = HERE.parent / "src/replicax/_ps"
    replay = {"group_replay", "replay_file", "replay_plan", "replayed_exchange", "replayed_rounds"}
    replay |= {"logged_events", "logged_rounds"}
    parts: dict[str, int] = {"exchange": 0, "replay": 0, "callback": 0}
    for path in sorted((folder / "local_updates").glob("*.py")):
        parts["replay" if path.stem in replay else "exchange"] += code_lines(path)
    parts["callback"] = code_lines(folder / "keras/local_updates_callback.py")
    of_each = ", ".join(f"{name} {count}" for name, count in parts.items())
    print(f"\nlines: {sum(parts.values())} code lines ({of_each}); the estimate was 720, without a replay")


def code_lines(path: Path) -> int:
    """The lines of a file without blank lines, comments and docstrings."""
    text = path.read_text()
    no_code = {
        tokenize.COMMENT,
        tokenize.NL,
        tokenize.NEWLINE,
        tokenize.INDENT,
        tokenize.DEDENT,
        tokenize.ENDMARKER,
    }
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in no_code:
            found.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            assert node.end_lineno is not None
            found.difference_update(range(node.lineno, node.end_lineno + 1))
    return len(found)


ROWS = {
    "lines": lines,
    "equal": equal,
    "kill": kill,
    "server": server,
    "step": step,
    "wire": wire,
    "quality": quality,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=ROWS, help="one row")
    parser.add_argument(
        "--rounds", type=int, help="trials of a row (default: 5 kills of a group, 3 of others)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny rows, to see that they run")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1000, 2000, 4000], help="steps of `quality`"
    )
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[3e-3, 6e-3, 1.2e-2], help="its learning rates"
    )
    parser.add_argument("--seeds", type=int, default=2, help="its number of seeds")
    arguments = parser.parse_args()
    options = Options(arguments.rounds, arguments.quick, arguments.lengths, arguments.rates, arguments.seeds)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # and end what runs
    print(f"{os.cpu_count()} cores", flush=True)
    for name, row in ROWS.items():
        if arguments.only in (None, name):
            row(options)


if __name__ == "__main__":
    main()

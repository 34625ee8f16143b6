"""kill -9 of a group, and of the syncer: real processes on loopback. The others go on, and all end with equal values.

Each run is then replayed from its logs, bit for bit.
"""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time

import pytest

import replicax as rx
from replicax._src.cluster.machine_layout import free_ports

pytestmark = [pytest.mark.long, pytest.mark.timeout(280)]

SYNCER = """
import sys
import replicax as rx

options = rx.ServerOptions(snapshot_dir=sys.argv[2], snapshot_interval_s=0.5)
rx.Server({"ps": [sys.argv[1]]}, "ps", 0, config=options).join()
"""
TRAIN = """
import itertools
import jax, jax.numpy as jnp

trained = jax.jit(lambda p, step: jax.tree.map(lambda a: a - 0.01 * (a - jnp.sin(step)), p))

def train(groups, after=lambda step: None):
    params = groups.attach({"w": jnp.full(300, float(groups.index)), "b": jnp.zeros(5)})
    for step in itertools.count():
        params = groups.step(trained(params, step), tokens=7 + groups.index)
        after(step)
        if groups.should_stop and step % 10 == 0:
            return groups.finish(60)
"""
GROUP = (
    TRAIN
    + """
import json, logging, os, sys, time
import numpy as np
import replicax as rx

logging.basicConfig(level="INFO")
groups = rx.experimental.LocalUpdates(every=10, fragments=2, quorum=2, compression="int8", patience_s=5.0)
last, gap, steps = None, 0.0, 0

def after(step):
    global last, gap, steps
    time.sleep(0.03 if groups.index == 1 else 0.01)
    now = time.monotonic()
    last, gap, steps = now, max(gap, now - (last or now)), step
    if step % 20 == 0:
        print(step, groups.version, os.getpid(), flush=True)
    if groups.index == 0 and os.path.exists(sys.argv[1]):
        groups.stop()

params = train(groups, after)
w = np.asarray(params["w"]).tobytes().hex()
print(json.dumps({"w": w, "gap": gap, "step": steps, **groups.statistics()}), flush=True)
"""
)


def assert_replayed(folder, *, processes, program=TRAIN):
    """Replays a run from its logs."""
    names = {}
    exec(program, names)
    report = rx.testing.replay_groups(folder, names["train"])
    assert report.processes == processes
    assert report.versions > 20
    assert report.pushes > 40


class Processes:
    """Processes with their output in files."""

    def __init__(self, folder):
        self.folder, self.running = folder, {}

    def start(self, name, program, *arguments, **environ):
        environ = {**os.environ, "JAX_PLATFORMS": "cpu", **environ}
        with (self.folder / name).open("a") as out:
            command = [sys.executable, "-c", program, *arguments]
            self.running[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environ)

    def kill(self, name):
        process = self.running.pop(name)
        process.kill()
        process.wait(10)

    def lines(self, name):
        with contextlib.suppress(FileNotFoundError):
            return (self.folder / name).read_text().splitlines()
        return []

    def wait_for(self, name, is_so, limit_s=60.0):
        deadline = time.monotonic() + limit_s
        while not (lines := [line for line in self.lines(name) if is_so(line)]):
            assert time.monotonic() < deadline, (name, self.lines(name)[-20:])
            time.sleep(0.05)
        return lines


@pytest.fixture
def processes(tmp_path):
    processes = Processes(tmp_path)
    yield processes
    for name in list(processes.running):
        processes.kill(name)


def has_version(least):
    def is_so(line):
        numbers = line.split()
        return len(numbers) == 3 and all(map(str.isdecimal, numbers)) and int(numbers[1]) >= least

    return is_so


def test_kill_of_a_group_and_of_the_syncer_stops_nobody(processes, tmp_path):
    address = f"localhost:{free_ports(1)[0]}"
    environ = {"REPLICAX_SYNCERS": address, "REPLICAX_START_TIMEOUT_S": "60"}

    def start_syncer():
        processes.start("syncer", SYNCER, address, str(tmp_path / "snapshots"))

    def start_group(index):
        own = {"REPLICAX_GROUP": f"{index}/3", "REPLICAX_CHECKPOINT_DIR": str(tmp_path / f"group-{index}")}
        processes.start(f"group {index}", GROUP, str(tmp_path / "stop"), **environ, **own)

    start_syncer()
    for index in range(3):
        start_group(index)
    processes.wait_for("group 0", has_version(5), 120.0)
    processes.kill("group 2")
    version = max(int(line.split()[1]) for line in processes.wait_for("group 0", has_version(5)))
    processes.wait_for("group 0", has_version(version + 5))
    start_group(2)
    time.sleep(1.0)
    processes.kill("syncer")
    time.sleep(2.0)
    start_syncer()
    version = max(int(line.split()[1]) for line in processes.wait_for("group 0", has_version(5)))
    processes.wait_for("group 0", has_version(version + 5))
    (tmp_path / "stop").touch()
    ends = []
    for index in range(3):
        (end,) = processes.wait_for(f"group {index}", lambda line: line.startswith('{"w"'), 120.0)
        ends.append(json.loads(end))
    assert len({end["w"] for end in ends}) == 1
    for end in ends[:2]:
        assert end["gap"] < 2.0  # the syncer was away for longer
        assert end["silent_servers"] in (1, 2)
    for index in range(2):
        silent = [line for line in processes.lines(f"group {index}") if "does not answer" in line]
        assert 1 <= len(silent) <= 2
    assert_replayed(tmp_path, processes=4)


def test_launched_run_with_a_killed_and_a_slow_group_is_replayed(processes, tmp_path):
    program = tmp_path / "train.py"
    program.write_text(GROUP)
    runs = tmp_path / "runs"
    launch = "import sys; from replicax.__main__ import main; sys.exit(main(sys.argv[1:]))"
    options = ["--groups", "3", "--syncers", "1", "--max-restarts", "1", "--checkpoint-dir", str(runs)]
    processes.start("job", launch, "launch", *options, str(program), str(tmp_path / "stop"))

    def of_group(index, is_so):
        prefix = re.compile(rf"\[?group {index}\b\W*")

        def is_its(line):
            match = prefix.match(line)
            return match is not None and is_so(line[match.end() :])

        return is_its

    lines = processes.wait_for("job", of_group(2, has_version(4)), 120.0)
    killed = int(lines[-1].split()[-1])
    os.kill(killed, signal.SIGKILL)
    goes_on = of_group(2, lambda line: has_version(4)(line) and int(line.split()[-1]) != killed)
    (version, *_) = [int(line.split()[-2]) for line in processes.wait_for("job", goes_on, 120.0)]
    processes.wait_for("job", of_group(0, has_version(version + 5)), 120.0)
    (tmp_path / "stop").touch()
    assert processes.running["job"].wait(120) == 0, processes.lines("job")[-20:]
    assert_replayed(runs, processes=4)


def test_all_killed_at_once_and_started_again_go_on_from_the_snapshot(processes, tmp_path):
    def start(again):
        address = f"localhost:{free_ports(1)[0]}"  # as the launcher, which takes other ports
        processes.start(f"syncer{again}", SYNCER, address, str(tmp_path / "snapshots"))
        for index in range(2):
            processes.start(
                f"group {index}{again}", GROUP, str(tmp_path / "stop"),
                REPLICAX_SYNCERS=address, REPLICAX_START_TIMEOUT_S="60", REPLICAX_GROUP=f"{index}/2",
            )  # fmt: skip

    start("")
    processes.wait_for("group 0", has_version(4), 120.0)
    for name in list(processes.running):
        processes.kill(name)
    start(" again")
    for index in range(2):
        (first, *_) = processes.wait_for(f"group {index} again", has_version(0), 120.0)
        assert int(first.split()[1]) >= 1  # the snapshot is at most 0.5 s older
        (said,) = processes.wait_for(f"group {index} again", lambda line: "has started again" in line)
        assert int(said.split("after ")[1].split()[0]) >= 10
    (tmp_path / "stop").touch()
    ends = []
    for index in range(2):
        (end,) = processes.wait_for(f"group {index} again", lambda line: line.startswith('{"w"'), 120.0)
        ends.append(json.loads(end))
    assert ends[0]["w"] == ends[1]["w"]
    assert [end["lost_pushes"] for end in ends] == [0, 0]

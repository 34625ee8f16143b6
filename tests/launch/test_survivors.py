"""``replicax launch`` of a training that tolerates failures: workers are killed, and the others finish, or they are
started again.
"""

import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request

import pytest

from checks import is_there

LIMIT_S = 150
pytestmark = [pytest.mark.timeout(400), pytest.mark.rest]

TRAINING = """
import hashlib, os, sys, time
os.environ["KERAS_BACKEND"] = "jax"
import keras, numpy as np
import replicax as rx

folder = sys.argv[1]
strategy = rx.MultiWorkerMirroredStrategy(fault_tolerance=True)
rng = np.random.default_rng(0)
x = rng.normal(size=(960, 6)).astype("float32")
y = (x.sum(1) > 0).astype("int32")
keras.utils.set_random_seed(1)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(8), keras.layers.Dense(2)])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))


class Waits(keras.callbacks.Callback):
    num_steps = 0

    def on_train_batch_end(self, batch, logs=None):
        self.num_steps += 1
        if self.num_steps == 15:
            open(f"{folder}/{os.getpid()}", "w").close()
        name = {15: "go", 25: "seen"}.get(self.num_steps)
        until = time.monotonic() + 120
        while name and not os.path.exists(f"{folder}/{name}") and time.monotonic() < until:
            time.sleep(0.02)


model.fit(x, y, batch_size=96, epochs=3, verbose=0, callbacks=[Waits()])
digest = hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in model.get_weights()))
print("weights", digest.hexdigest(), rx.is_chief(), flush=True)
"""


def until(get, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not (value := get()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.05)
    return value


def status_of(address):
    """The status; nothing if nobody serves it now, or who serves it dies in the middle of its answer."""
    try:
        with urllib.request.urlopen(f"http://{address}/status.json", timeout=5) as answer:
            return json.loads(answer.read())
    except (OSError, http.client.HTTPException):
        return {}


# Takes its time for each step until ``fast`` is there.
COMES_BACK = (
    TRAINING.partition("class Waits")[0]
    + """
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        if batch == 3:
            open(f"{folder}/{os.getpid()}", "w").close()
        if not os.path.exists(f"{folder}/fast"):
            time.sleep(0.4)


saving = rx.keras.callbacks.CheckpointCallback(f"{folder}/saved", save_freq=1000)
history = model.fit(x, y, batch_size=96, epochs=60, verbose=0, callbacks=[Slow(), saving])
digest = hashlib.sha256(b"".join(np.asarray(weight).tobytes() for weight in model.get_weights()))
digest.update(repr(history.history["loss"]).encode())
print("weights", digest.hexdigest(), rx.is_chief(), flush=True)
"""
)


class Launched:
    """A launch of three workers, which wait after step 15 for ``go`` and after step 25 for ``seen``."""

    def __init__(self, folder, *options, program=TRAINING, **environment):
        self.folder = folder
        folder.mkdir()
        script = folder / "train.py"
        script.write_text(program)
        options = ["--workers", "3", "--plain", "--status", *options, str(script), str(folder)]
        self.output = (folder / "output").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "replicax", "launch", *options],
            stdout=self.output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("REPLICAX_STATUS")}
            | environment,
        )

    @property
    def shown(self):
        return (self.folder / "output").read_text()

    @property
    def address(self):
        return until(lambda: re.search(r"Status: http://(\S+)/ and", self.shown), "the address")[1]

    @property
    def pids(self):
        return [int(path.name) for path in self.folder.iterdir() if path.name.isdecimal()]

    def tell(self, *names):
        for name in names:
            (self.folder / name).touch()

    def weights(self):
        """Waits for the end. Returns the digests of the weights of all workers that have ended with them."""
        assert self.process.wait(LIMIT_S) == 0, self.shown
        return re.findall(r"worker (\d) \| weights (\w+) (\w+)", self.shown)

    def close(self):
        self.process.kill()
        self.process.wait()
        self.output.close()


@pytest.fixture
def launch(tmp_path):
    made = []

    def launched(name, *options, **more):
        made.append(Launched(tmp_path / name, *options, **more))
        return made[-1]

    yield launched
    for each in made:
        each.close()


def test_survivors_of_a_killed_chief_finish_with_the_same_bits_and_the_next_chief_serves_the_status(launch):
    undisturbed = launch("undisturbed")
    undisturbed.tell("go", "seen")
    expected = undisturbed.weights()
    assert sorted(expected) == [(str(n), expected[0][1], str(n == 0)) for n in range(3)]

    killed = launch("killed")
    until(lambda: len(killed.pids) == 3, "step 15")
    before = until(
        lambda: (status := status_of(killed.address)) and status["tasks"][0].get("pid") and status,
        "the process of the chief",
    )
    assert (before["survivors"]["members"], before["survivors"]["adopted"]) == ([0, 1, 2], {})
    os.kill(before["tasks"][0]["pid"], signal.SIGKILL)
    killed.tell("go")
    after = until(
        lambda: (status := status_of(killed.address)) and status["survivors"]["num_recoveries"] and status,
        "the status of the next chief",
    )
    assert after["survivors"]["members"] == [1, 2]
    assert after["survivors"]["adopted"] == {"0": 1}
    assert after["survivors"]["epoch"] == 2
    until(
        lambda: (status := status_of(killed.address)) and status["tasks"][0]["state"] == "lost",
        "the dead worker's state",
    )
    killed.tell("seen")
    assert sorted(killed.weights()) == [(str(n), expected[0][1], str(n == 1)) for n in (1, 2)]
    assert "worker 0 died (SIGKILL); the other workers continue.\n" in killed.shown
    assert "Waiting up to" not in killed.shown
    assert not [pid for pid in killed.pids if is_there(pid)]


@pytest.mark.long
def test_stopped_worker_that_wakes_after_the_others_have_finished_ends_itself_and_the_job_succeeds(launch):
    stopped = launch("stopped", REPLICAX_SILENCE_TIMEOUT_S="6")
    until(lambda: len(stopped.pids) == 3, "step 15")
    pid = until(
        lambda: (tasks := status_of(stopped.address).get("tasks")) and tasks[1].get("pid"),
        "the process of worker 1",
    )
    os.kill(pid, signal.SIGSTOP)
    stopped.tell("go", "seen")
    others = [each for each in stopped.pids if each != pid]
    until(lambda: not any(map(is_there, others)), "the end of the others")
    os.kill(pid, signal.SIGCONT)
    assert [number for number, *_ in sorted(stopped.weights())] == ["0", "2"]
    assert (
        "worker 1 exited with code 1: the others had given it up, and have gone on without it."
        in stopped.shown
    )
    assert "is killed" not in stopped.shown


@pytest.mark.long
def test_killed_workers_come_back_while_the_others_train_and_no_bit_changes(launch):
    """Worker 2 is killed, and worker 0, the chief, when the first one is back."""
    undisturbed = launch("undisturbed", program=COMES_BACK)
    undisturbed.tell("fast")
    expected = undisturbed.weights()
    assert sorted(expected) == [(str(n), expected[0][1], str(n == 0)) for n in range(3)]

    killed = launch("killed", "--max-restarts", "5", program=COMES_BACK)
    until(lambda: len(killed.pids) == 3, "step 3")
    for num_back, victim in enumerate((2, 0), start=1):
        before = until(
            lambda victim=victim: (
                (tasks := status_of(killed.address).get("tasks")) and tasks[victim].get("pid")
            ),
            "the process of the victim",
        )
        os.kill(before, signal.SIGKILL)
        back = until(
            lambda num_back=num_back: (
                (status := status_of(killed.address).get("survivors", {}))
                and len(killed.pids) == 3 + num_back
                and status["members"] == [0, 1, 2]
                and status
            ),
            f"the replacement of worker {victim}",
        )
        assert back["adopted"] == {}
        task = until(
            lambda victim=victim, before=before: (
                (tasks := status_of(killed.address).get("tasks"))
                and tasks[victim]["state"] in ("running", "slow")
                and tasks[victim].get("pid") not in (None, before)
                and tasks[victim]
            ),
            "the figures of the replacement",
        )
        assert task["restarts"] == 1
    killed.tell("fast")
    assert sorted(killed.weights()) == sorted(expected)
    for number, victim in enumerate((2, 0), start=1):
        note = f"worker {victim} was killed by SIGKILL. The others continue; starting it again: restart {number} of 5."
        assert note in killed.shown
    assert "Warning" not in killed.shown
    assert "has no status" not in killed.shown
    assert not [pid for pid in killed.pids if is_there(pid)]

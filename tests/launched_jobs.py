"""Programs for `replicax launch` that save and resume, and a job whose tasks several tests kill."""

import contextlib
import inspect
import os
import queue
import random
import re
import signal
import subprocess
import sys
import threading
import time

import training_pieces
from checks import path_of_programs
from training_pieces import bits_of, model_with_random_layers, momentum_training

_HEAD = """\
import os
print("pid", os.getpid(), flush=True)
"""


def looping(num_steps, batch_size=12, pause_s=0.02, save_every=4):
    """A loop with momentum, a random mask for the global batch, a count with a value per replica, and a position.

    It prints the number of compiled programs that JAX had not kept.
    """
    import collections
    import os
    import time

    import jax
    import jax.numpy as jnp

    import replicax as rx

    events = collections.Counter()
    jax.monitoring.register_event_listener(lambda event, **_: events.update([event.rpartition("/")[2]]))
    is_launched = "TF_CONFIG" in os.environ
    strategy = (
        rx.MultiWorkerMirroredStrategy() if is_launched else rx.MirroredStrategy(jax.local_devices()[:2])
    )
    training = momentum_training(strategy, batch_size)
    step, iterator = training.step, training.iterator
    with strategy.scope():
        total = rx.Variable(
            0.0, synchronization="on_read", aggregation="sum", trainable=False
        )  # of rows that each replica had
    checkpoint = rx.Checkpoint(
        step=step, weights=training.weights, velocities=training.velocities, total=total, iterator=iterator
    )
    manager = rx.CheckpointManager(checkpoint, os.environ["REPLICAX_CHECKPOINT_DIR"], max_to_keep=2)
    manager.restore_or_initialize()
    first = int(step)

    def update(batch):
        total.assign_add(jnp.sum(jnp.abs(batch[0])))
        return training.update(batch)

    for number in range(first, num_steps):
        loss = strategy.reduce("SUM", strategy.run(update, args=(next(iterator),)), axis=None)
        print("step", number, f"loss {float(loss):.9g}", flush=True)
        time.sleep(pause_s)
        if (number + 1) % save_every == 0:
            manager.save()
    print("anew", events["compile_requests_use_cache"] - events["cache_hits"], flush=True)
    manager.close()
    print("bits", bits_of([*training.weights, *training.velocities], float(total)), flush=True)


def fitting(epochs=3, batch_size=12, pause_s=0.02, save_every=4):
    """Keras's fit with dropout and batch normalisation, on shuffled rows."""
    import os
    import time

    import jax
    import keras
    import numpy as np

    import replicax as rx

    is_launched = not {"TF_CONFIG", "SLURM_PROCID"}.isdisjoint(os.environ)
    strategy = (
        rx.MultiWorkerMirroredStrategy() if is_launched else rx.MirroredStrategy(jax.local_devices()[:2])
    )
    model = model_with_random_layers(strategy)

    class Steps(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            print("step", batch, f"loss {logs['loss']:.9g}", flush=True)
            time.sleep(pause_s)

    rows = np.random.default_rng(0).standard_normal((158, 8)).astype(np.float32)
    saving = rx.keras.callbacks.CheckpointCallback(
        os.environ["REPLICAX_CHECKPOINT_DIR"], save_freq=save_every, max_to_keep=2
    )
    history = model.fit(
        rows, rows[:, :1], batch_size=batch_size, epochs=epochs, verbose=0, callbacks=[Steps(), saving]
    )
    for epoch, loss in enumerate(history.history["loss"]):
        print("epoch", epoch, f"loss {loss:.9g}", flush=True)
    print("bits", bits_of([*model.variables, *model.optimizer.variables], history.history), flush=True)


def source_of(program):
    """The source of a function, after that of the pieces that it may call."""
    return f"{inspect.getsource(training_pieces)}\n\n{inspect.getsource(program)}"


def write_script(folder, program, arguments=""):
    """Writes a script that prints its process id, and calls one of these functions."""
    script = folder / f"{program.__name__}.py"
    script.write_text(f"{_HEAD}{source_of(program)}\n\n{program.__name__}({arguments})\n")
    return script


def getting_stuck(num_steps=20):
    """Steps that call back into Python. In the tenth of the first start, worker 1 does not come back."""
    import os
    import time

    import jax
    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy()
    index, restarts = strategy.cluster_resolver.task_id, int(os.environ["REPLICAX_RESTART_COUNT"])
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))
    calls = []

    def read_a_sensor(x):
        calls.append(x)
        if (index, restarts, len(calls)) == (1, 0, 10):
            time.sleep(10_000)
        return np.asarray(x)

    def step(x):
        value = jax.pure_callback(read_a_sensor, jax.ShapeDtypeStruct((), np.float32), x)
        return rx.get_replica_context().all_reduce("SUM", value)

    for _ in range(num_steps):
        total = strategy.reduce("MEAN", strategy.run(step, args=(ones,)), axis=None)
    print("total", float(total), flush=True)


def staying_away(num_steps=10):
    """Steps with a limit of five seconds. In the first start, worker 1 sleeps before the sixth, and never comes."""
    import os
    import time

    import numpy as np

    import replicax as rx

    strategy = rx.MultiWorkerMirroredStrategy(
        communication_options=rx.CommunicationOptions(timeout_seconds=5)
    )
    index, restarts = strategy.cluster_resolver.task_id, int(os.environ["REPLICAX_RESTART_COUNT"])
    ones = strategy.experimental_distribute_values_from_function(lambda context: np.float32(1))

    def step(x):
        return rx.get_replica_context().all_reduce("SUM", x)

    def read_a_sensor():
        time.sleep(10_000)

    for number in range(num_steps):
        if (index, restarts, number) == (1, 0, 5):
            read_a_sensor()
        total = strategy.reduce("MEAN", strategy.run(step, args=(ones,)), axis=None)
    print("total", float(total), flush=True)


def environment():
    """The process of the launcher. Its tasks may keep Python's compiled files; otherwise each start would compile 300
    files again."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "KERAS_BACKEND": "jax", "PYTHONPATH": path_of_programs()}


class JobOutput:
    """The lines of a job's tasks, ``worker 0 | text``, which threads add. None marks the end."""

    def __init__(self):
        self.lines, self._new = [], queue.Queue()

    def add(self, line):
        if line is not None:
            self.lines.append(line)
        self._new.put(line)

    def next_line(self, pattern, timeout_s):
        """The match of the next unread line that begins with this text; None if there is no more."""
        deadline = time.monotonic() + timeout_s
        while True:
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"no {pattern!r} in {timeout_s} s\n{self.text()}"
            with contextlib.suppress(queue.Empty):
                line = self._new.get(timeout=left_s)
                if line is None:
                    self._new.put(None)
                    return None
                if found := re.match(pattern, line):
                    return found

    def printed(self, word):
        """The rest of each task's lines that begin with this word, as (task, rest), in order."""
        return re.findall(rf"^(\w+ \d+) \| {word} (.*)$", "\n".join(self.lines), re.MULTILINE)

    def text(self, num_lines=60):
        return "\n".join(self.lines[-num_lines:])


class LaunchedJob(JobOutput):
    """`replicax launch` with one of these programs, as a process; its tasks are identified by their output.

    Args:
      folder: The folder of the script and the checkpoints, from which other jobs may resume.
      program: One of these functions, and its arguments.
      workers, max_restarts: The options of the launcher.
      devices: The option that gives each worker its devices.
    """

    def __init__(
        self, folder, program, arguments="", *, workers=2, max_restarts=0, devices="--devices-per-worker"
    ):
        super().__init__()
        folder.mkdir(exist_ok=True)
        self.saved = folder / "saved"
        script = write_script(folder, program, arguments)
        self._launcher = subprocess.Popen(
            [sys.executable, "-m", "replicax", "launch", "--plain", "--workers", str(workers)]
            + [devices, "1", "--max-restarts", str(max_restarts)]
            + ["--checkpoint-dir", str(self.saved), str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment(),
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        for line in self._launcher.stdout:
            self.add(line.rstrip("\n"))
        self.add(None)

    def wait(self, timeout_s):
        """The exit code."""
        code = self._launcher.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def wait_for_checkpoint(self, timeout_s):
        """Waits for a checkpoint that did not exist when the call started; returns True if it came before the end."""
        deadline, before = time.monotonic() + timeout_s, self._checkpoints()
        while self._launcher.poll() is None:
            if self._checkpoints() - before:
                return True
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)
        return False

    def _checkpoints(self):
        return {path.name for path in self.saved.glob("ckpt-*") if ".part-" not in path.name}

    def __enter__(self):
        return self

    def __exit__(self, *error):
        if self._launcher.poll() is None:
            self._launcher.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._launcher.wait(30)
            self._launcher.kill()
            self._launcher.wait()
        self._reader.join(30)
        self._launcher.stdout.close()


def kill_after_saving(job, victim, timeout_s, num_tasks=2, before=lambda: None):
    """Kills a task with `kill -9` once this start has a checkpoint; calls ``before`` first, and returns its result."""
    pids = pids_of(job, num_tasks, timeout_s)
    assert job.wait_for_checkpoint(timeout_s), job.text()
    done = before()
    os.kill(pids[victim], signal.SIGKILL)
    return done


def kill_at_random(job, num_kills, *, seed, timeout_s, num_tasks=2):
    """Kills tasks with `kill -9`, one after the other: mostly in one of the first 20 steps, sometimes while they
    start.

    Returns:
      Returns the killed tasks and the times; fewer if the job ends before.
    """
    random_one, killed = random.Random(seed), []
    while len(killed) < num_kills and (pids := pids_of(job, num_tasks, timeout_s)):
        is_starting = random_one.random() < 0.1
        for _ in range(0 if is_starting else random_one.randint(1, 20 * num_tasks)):
            job.next_line(r"worker \d+ \| step", timeout_s)
        time.sleep(random_one.uniform(0, 3 if is_starting else 0.05))
        victim = random_one.choice(sorted(pids))
        with contextlib.suppress(ProcessLookupError):
            os.kill(pids[victim], signal.SIGKILL)
            killed.append((victim, "start" if is_starting else "step"))
    return killed


def pids_of(job, num_tasks, timeout_s):
    """The starting tasks, by name; None if the job has ended."""
    pids = {}
    while len(pids) < num_tasks:
        if (found := job.next_line(r"(worker \d+) \| pid (\d+)", timeout_s)) is None:
            return None
        pids[found[1]] = int(found[2])
    return pids

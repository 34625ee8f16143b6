"""A cluster in memory: real ``Peers``, ``Channel`` and ``Controller``, without processes, sockets or time.

One thread runs at a time, and hands over where it would wait. Time passes when all threads wait.
"""

import contextlib
import json
import threading
import types

from replicax._src.cluster import channel as channel_module
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.failures import ClusterFailureError
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.control.controller import Controller
from replicax._src.wire.security import Security

STEP_S = 0.1
PATIENCE_S = 60  # of real time, for a step of one thread


class Cluster:
    """The tasks of a cluster.

    Args:
      monkeypatch: Replaces the clock of the channel.
      scripts: For each worker a function of a ``Worker``.
      limit_s: The longest time, in seconds of the cluster.
    """

    def __init__(self, monkeypatch, scripts, limit_s=700.0, **options):
        self.now, self.limit_s = 0.0, limit_s
        self.controller = Controller([f"worker {n}" for n in range(len(scripts))], **options)
        self.messages, self.threads, self.at = [], [], {}
        clock = types.SimpleNamespace(monotonic=lambda: self.now, sleep=self.sleep)
        monkeypatch.setattr(channel_module, "time", clock)
        monkeypatch.setattr(channel_module, "user_line", lambda: f"script.py:{self.current.number} in work")
        monkeypatch.setattr(
            channel_module, "user_line_of_thread", lambda thread: f"script.py:{self.current.number} in work"
        )
        self.workers = [Worker(self, number, len(scripts)) for number in range(len(scripts))]
        self.current = self.workers[0]
        for number in range(len(scripts)):
            assert self.controller.join(number, 0.0) is None
        self.failure = None
        for worker, script in zip(self.workers, scripts, strict=True):
            worker.start(script)

    def run(self):
        """Runs until all scripts have ended. Returns the workers."""
        next_beat = 0.0
        while any(thread.is_alive for thread in self.threads if thread.is_script):
            assert self.now < self.limit_s, "the workers wait without end"
            for thread in list(self.threads):
                thread.step()
                self.deliver()
            self.now = round(self.now + STEP_S, 3)
            if self.now >= next_beat:
                next_beat = self.now + 1.0
                for worker in self.workers:
                    self.current = worker
                    if not worker.has_left:
                        worker.channel._heartbeat(round(self.now))
                self.deliver()
                self.send(self.controller.tick(self.now))
        for thread in self.threads:
            thread.end()
        return self.workers

    def deliver(self):
        while self.messages:
            number, message = self.messages.pop(0)
            if message["kind"] == "left":
                self.workers[number].has_left = True
            self.send(self.controller.receive(number, message, self.now))

    def send(self, outbox):
        for number, message in outbox:
            self.workers[number].channel._receive(json.loads(json.dumps(message)))

    def sleep(self, seconds):
        until = self.now + seconds
        while self.now < until:
            Thread.here.hand_over()


class Ended(BaseException):
    """The simulation is over."""


class Thread:
    """A thread that runs only in ``step``."""

    here = None

    def __init__(self, cluster, worker, function, is_script):
        self.cluster, self.worker, self.is_script = cluster, worker, is_script
        self.may_run, self.has_stopped = threading.Semaphore(0), threading.Semaphore(0)
        self.is_alive, self.is_over = True, False
        self.thread = threading.Thread(target=self.body, args=(function,), daemon=True)
        self.thread.start()

    def body(self, function):
        self.may_run.acquire()
        with contextlib.suppress(Ended):
            if not self.is_over:
                function()
        self.is_alive = False
        self.has_stopped.release()

    def step(self):
        if self.is_alive:
            Thread.here, self.cluster.current = self, self.worker
            self.may_run.release()
            assert self.has_stopped.acquire(timeout=PATIENCE_S)

    def hand_over(self):
        self.has_stopped.release()
        self.may_run.acquire()
        if self.is_over:
            raise Ended

    def end(self):
        self.is_over = True
        self.step()
        self.thread.join(timeout=PATIENCE_S)


class _Changed:
    """Replaces the condition of a channel."""

    def __enter__(self):
        pass

    def __exit__(self, *error):
        pass

    def wait(self, timeout_s):
        Thread.here.hand_over()

    def notify_all(self):
        pass


class _MemoryChannel(Channel):
    def __init__(self, cluster, membership):
        super().__init__(membership, Security(b"secret"))
        self._cluster, self._changed = cluster, _Changed()

    def _send(self, message):
        self._cluster.messages.append((self._number, json.loads(json.dumps(message))))


class Worker:
    """What a script sees: the calls of replicax, as the channel and the devices see them.

    Attributes:
      error: The error of its script.
      waits_from: The time at which its script began to wait for the last time.
      error_at: The time of the error.
    """

    def __init__(self, cluster, number, num_workers):
        self.cluster, self.number, self.num_workers = cluster, number, num_workers
        spec = ClusterSpec({"worker": [f"h:{n + 1}" for n in range(num_workers)]})
        self.membership = Membership(spec, Task("worker", number))
        self.channel = _MemoryChannel(cluster, self.membership)
        self.error, self.error_at, self.waits_from, self.has_left = None, None, 0.0, False
        self.reached, self.num_saves, self.datasets = {}, 0, []

    def start(self, script):
        def body():
            self.channel.program_thread = threading.get_ident()
            self.peers = Peers(self.channel, self.membership, 600.0)
            self.channel.on_failure = lambda failure: None
            try:
                script(self)
            except ClusterFailureError as error:
                self.error, self.error_at = error, self.cluster.now
            self.channel._send({"kind": "left", "status": self.channel._status})

        self.cluster.threads.append(Thread(self.cluster, self, body, is_script=True))

    def in_background(self, function):
        def body():
            with contextlib.suppress(ClusterFailureError):
                function()

        self.cluster.threads.append(Thread(self.cluster, self, body, is_script=False))

    def work(self, seconds):
        """Does something else."""
        self.cluster.sleep(seconds)

    def begins(self):
        self.waits_from = self.cluster.now

    # --- calls --------------------------------------------------------------------------------------

    def program(self, name, *, is_read=False, inside_s=0.0, afterwards_s=0.0):
        """A program: its collective needs all workers in the program at the same position."""
        self.begins()
        label = self.peers.agree(name, f"code of {name}")
        with self.peers.running(label, is_new=False, agrees=is_read):
            self.cluster.sleep(inside_s)  # it compiles
            here = (self.peers._position, label)
            self.reached[here] = True
            while not all(here in worker.reached for worker in self.cluster.workers):
                self.channel.check(self.peers._position)
                Thread.here.hand_over()
            self.cluster.sleep(afterwards_s)  # a callback without a collective

    def run(self, **times):
        self.program("step", **times)

    def reduce(self):
        self.program("strategy.reduce")

    def gather(self):
        self.program("strategy.gather")

    def on_read(self):
        self.program("reading variable 'total'", is_read=True)

    def fit(self):
        self._loop("fit")

    def evaluate(self):
        self._loop("evaluate")

    def predict(self):
        self._loop("predict")

    def _loop(self, method):
        self.begins()
        methods = self.peers.gather("keras data", method, f"to start {method}")
        if set(methods) != {method}:
            raise channel_module.mismatch_error(self.peers.names, [])  # see tests/keras/test_workers.py
        self.peers.gather("keras random", 1, f"to start {method}")
        for _ in range(2):
            self.program(f"Sequential.{method}_step")

    def save(self, *, is_asynchronous=False):
        self.begins()
        self.num_saves += 1
        number = self.num_saves
        self.peers.gather(f"checkpoint copying for {number}", 1, "to agree on copying (checkpoint)")

        def write():
            for what in ("written", "committed"):
                self.peers.gather_once(f"checkpoint {number} {what}", 1, "for writing")

        self.in_background(write) if is_asynchronous else write()

    def restore(self):
        self.begins()
        for what in ("opening a checkpoint", "restoring"):
            self.peers.gather(f"checkpoint {what}", 1, f"to agree on {what} (checkpoint)")

    def dataset(self):
        """Takes a batch of the first dataset."""
        if not self.datasets:
            self.datasets.append(Dataset(self))
        self.datasets[0].take()

    def end(self):
        raise Ended


class Dataset:
    """A dataset of which a thread reads two batches ahead, together with the other workers.

    Args:
      length: The number of batches of this worker. All go on until the last one has none.
      read_s: The time of each read.
    """

    def __init__(self, worker, length=10**6, read_s=0.0):
        self.worker, self.length, self.read_s = worker, length, read_s
        self.topic = worker.peers.new_topic("data")
        self.ready, self.has_ended = [], False
        worker.in_background(self.read_ahead)

    def read_ahead(self):
        number = 0
        while not self.has_ended:
            while len(self.ready) >= 2:
                Thread.here.hand_over()
            self.worker.cluster.sleep(self.read_s)
            offers = self.worker.peers.gather(self.topic, number < self.length, "to read the next batch")
            number += 1
            self.has_ended = not any(offers)
            self.ready.append(not self.has_ended)

    def take(self):
        """Returns True, or False at the end."""
        self.worker.begins()
        with contextlib.suppress(StopIteration):
            with self.worker.peers.reading(self.topic):
                while not self.ready:
                    self.worker.channel.check()
                    Thread.here.hand_over()
                if not self.ready[0]:
                    raise StopIteration
            self.ready.pop(0)
            self.worker.peers.note_reads(1)
            return True
        return False

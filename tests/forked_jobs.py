"""``ForkedJob``: a job whose workers are forks of one process that has imported JAX, Keras and replicax."""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from launched_jobs import JobOutput, environment, write_script
from replicax._src.cluster.machine_layout import free_ports

ENVIRONMENT = environment()  # without what a test adds later


class ForkedJob(JobOutput):
    """A job like ``LaunchedJob`` that starts in a tenth of the processor time. Nobody launches or restarts its workers,
    which have TF_CONFIG.
    """

    def __init__(self, folder, program, arguments="", *, workers):
        super().__init__()
        folder.mkdir(exist_ok=True)
        self.saved = folder / "saved"
        script = write_script(folder, program, arguments)
        addresses = [f"127.0.0.1:{port}" for port in free_ports(workers)]
        self._codes, self._readers = {}, []
        for number in range(workers):
            output = folder / f"output-{number}"
            os.mkfifo(output)
            self._readers.append(threading.Thread(target=self._read, args=(output, number), daemon=True))
            self._readers[-1].start()
            task = {"type": "worker", "index": number}
            variables = {
                "TF_CONFIG": json.dumps({"cluster": {"worker": addresses}, "task": task}),
                "REPLICAX_CHECKPOINT_DIR": str(self.saved),
            }
            request = {"script": str(script), "output": str(output)}
            self._codes[ask({**request, "environment": {**environment(), **variables}})] = None
        threading.Thread(target=self._mark_end, daemon=True).start()

    def _read(self, output, number):
        with open(output) as file:
            for line in file:
                self.add(f"worker {number} | {line.rstrip()}")

    def _mark_end(self):
        for reader in self._readers:
            reader.join()
        self.add(None)

    def _num_running(self):
        for pid, code in self._codes.items():
            if code is None:
                self._codes[pid] = ask({"pid": pid})
        return sum(code is None for code in self._codes.values())

    def wait(self, timeout_s):
        """0 if each worker has exited with 0 or was killed; otherwise the code of one that has not."""
        deadline = time.monotonic() + timeout_s
        while self._num_running():
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("the workers", timeout_s)
            time.sleep(0.05)
        for reader in self._readers:
            reader.join(timeout_s)
        return next((code for code in self._codes.values() if code not in (0, -signal.SIGKILL)), 0)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for pid, code in self._codes.items():
            if code is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        deadline = time.monotonic() + 30
        while self._num_running() and time.monotonic() < deadline:
            time.sleep(0.05)


@functools.cache
def server():
    """The process that forks."""
    process = subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("forked_workers.py"))],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**ENVIRONMENT, "OPENBLAS_NUM_THREADS": "1"},  # threads do not survive a fork
    )

    def close():
        process.stdin.close()
        process.stdout.close()
        process.wait()

    atexit.register(close)
    return process


def ask(request):
    """The answer of the process that forks."""
    print(json.dumps(request), file=server().stdin, flush=True)
    return json.loads(server().stdout.readline())

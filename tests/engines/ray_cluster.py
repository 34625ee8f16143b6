"""``RayCluster``: a real Ray cluster on this machine, of three nodes, which nodes may leave and join.

As a program it holds the cluster: the processes of Ray end with it, however it ends, because a guard watches it.
"""

import contextlib
import multiprocessing.connection
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from replicax._src.cluster.processes import Process, shown_lines

NUM_NODES, CPUS_PER_NODE = 3, 2
MEMORY = 80 << 20  # of the object store, the least that Ray takes


class RayCluster:
    """Three nodes beside the head, which has no CPUs. ``close`` removes all."""

    def __init__(self):
        self.folder = Path(
            tempfile.mkdtemp(prefix="rxr")
        )  # Ray's sockets lie in it: their paths must be short
        self._holder = Process(
            [sys.executable, __file__, str(self.folder)],
            name="Ray",
            own_folder=str(self.folder),
            environment={**os.environ, "RAY_TMPDIR": str(self.folder)},
        )
        try:
            self.address = self.ask("start", timeout_s=180)
        except BaseException:
            self.close()
            raise

    @property
    def environment(self):
        """The environment of a program that uses the cluster."""
        return {**os.environ, "RAY_ADDRESS": self.address, "RX_RAY_HOLDER": str(self.folder / "holder")}

    def ask(self, command, *arguments, timeout_s=60.0):
        return ask(self.folder / "holder", command, *arguments, timeout_s=timeout_s, holder=self._holder)

    def run(self, program, *arguments, timeout_s=240.0, **environment):
        """Runs a driver program to its end. Returns its exit code and its output."""
        with Process(
            [sys.executable, str(program), *map(str, arguments)],
            environment={**self.environment, **environment},
            name=Path(program).name,
            num_lines_kept=10_000,
        ) as driver:
            ending = driver.wait(timeout_s)
            return ending.exit_code, "\n".join(driver.lines)

    def close(self):
        self._holder.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def ask(socket, command, *arguments, timeout_s=60.0, holder=None):
    """Asks the program that holds the cluster. A worker may ask too, to lose its own node."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            with multiprocessing.connection.Client(str(socket), "AF_UNIX") as connection:
                connection.send((command, arguments))
                assert connection.poll(deadline - time.monotonic()), f"no answer to {command}"
                return connection.recv()
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > deadline or (holder is not None and not holder.is_running):
                raise AssertionError(f"Ray did not start.{shown_lines(holder.lines)}") from None
            time.sleep(0.2)


class Holder:
    """The commands that the cluster's program answers."""

    def __init__(self, folder):
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "object_store_memory": MEMORY, "include_dashboard": False}
        self._cluster = Cluster(initialize_head=True, head_node_args=head)
        self._nodes, self._drained = {}, []
        self.fill()

    def start(self):
        return self._cluster.address

    def fill(self):
        """Replaces nodes that are lost or taken away."""
        for node_id in self._drained:
            self.lose(node_id)
        self._drained.clear()
        while len(self._nodes) < NUM_NODES:
            node = self._cluster.add_node(num_cpus=CPUS_PER_NODE, object_store_memory=MEMORY)
            self._nodes[node.node_id] = node
        self._cluster.wait_for_nodes(timeout=60)

    def lose(self, node_id):
        """Kills all processes of a node."""
        self._cluster.remove_node(self._nodes.pop(node_id), allow_graceful=False)

    def drain(self, node_id, seconds):
        """Tells Ray that a node will be taken away, as a cloud's agent does."""
        self.fill()
        self._drained.append(node_id)
        command = ["ray", "drain-node", f"--address={self._cluster.address}", f"--node-id={node_id}"]
        command += ["--reason=DRAIN_NODE_REASON_PREEMPTION", "--reason-message=test"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        done = subprocess.run(
            [*command, f"--deadline-remaining-seconds={seconds}"],
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PATH": path},
        )
        return done.stdout + done.stderr


if __name__ == "__main__":
    made = Holder(sys.argv[1])
    with multiprocessing.connection.Listener(f"{sys.argv[1]}/holder", "AF_UNIX") as listener:
        while True:
            with contextlib.suppress(EOFError, OSError), listener.accept() as asked:  # a worker that is gone
                name, given = asked.recv()
                try:
                    asked.send(getattr(made, name)(*given))
                except Exception as error:
                    asked.send(repr(error))

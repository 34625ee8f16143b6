"""A process of ``continuous_checkpoints.py``: it trains, and one contestant saves again and again.

The state is a pytree of arrays, and a step replaces all of them and donates the old ones, as an optimizer does. In two
processes each has half of every array. After each step a line in a file says so, for the parent, which kills this
process at some moment.
"""

from __future__ import annotations

import abc
import ctypes
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, final

import numpy as np

NUM_ARRAYS, COLUMNS = 64, 512
NUM_STEPS_BEFORE = (
    10  # between the opening of a directory and the first save: the first step of a program compiles
)
RATE, SHIFT = np.float32(0.999), np.float32(0.001)
SAVED = "saved"  # the directory of the checkpoints, in the folder of a job
_END_WITH_PARENT = 1  # of prctl
NAMES = [f"array_{number}" for number in range(NUM_ARRAYS)]


# --- the contestants --------------------------------------------------------------------------------------


class Contestant(abc.ABC):
    """A library that saves checkpoints."""

    @abc.abstractmethod
    def load(self) -> None:
        """Imports the library."""

    @abc.abstractmethod
    def join(self, index: int, addresses: list[str]) -> None:
        """Makes this process one of several."""

    @abc.abstractmethod
    def open(self, directory: str, state: dict[str, Any]) -> None:
        """Opens a directory, for a state like this one."""

    @abc.abstractmethod
    def save(self, step: int, state: dict[str, Any]) -> bool:
        """Is called after each step. Returns True if a save begins."""

    @abc.abstractmethod
    def wait(self) -> None:
        """Waits until the save is on the disk."""

    @abc.abstractmethod
    def restore(self) -> dict[str, Any]:
        """Returns the newest state."""


@final
class Replicax(Contestant):
    def load(self) -> None:
        for name in ("replicax", "tensorstore"):
            importlib.import_module(name)

    def join(self, index: int, addresses: list[str]) -> None:
        import replicax as rx

        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
        os.environ["TF_CONFIG"] = json.dumps(cluster)
        rx.MultiWorkerMirroredStrategy()

    def open(self, directory: str, state: dict[str, Any]) -> None:
        import replicax as rx

        self._checkpoint = rx.Checkpoint(state=state)
        self._manager = rx.CheckpointManager(self._checkpoint, directory, max_to_keep=2, continuous=True)

    def save(self, step: int, state: dict[str, Any]) -> bool:
        self._checkpoint.state = state
        return self._manager.save(step) is not None

    def wait(self) -> None:
        self._manager.wait()

    def restore(self) -> dict[str, Any]:
        assert self._manager.restore_or_initialize() is not None
        return self._checkpoint.state


@final
class Orbax(Contestant):
    """``CheckpointManager`` with ``ContinuousCheckpointingPolicy``, as in Orbax's own benchmark."""

    def load(self) -> None:
        importlib.import_module("orbax.checkpoint")

    def join(self, index: int, addresses: list[str]) -> None:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(addresses[0], len(addresses), index)

    def open(self, directory: str, state: dict[str, Any]) -> None:
        import jax
        import orbax.checkpoint as ocp
        from orbax.checkpoint import checkpoint_managers as policies

        self._args = ocp.args
        self._like = {
            name: jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
            for name, array in state.items()
        }
        options = ocp.CheckpointManagerOptions(
            save_decision_policy=policies.ContinuousCheckpointingPolicy(),
            preservation_policy=policies.LatestN(2),
        )
        self._manager = ocp.CheckpointManager(directory, options=options)

    def save(self, step: int, state: dict[str, Any]) -> bool:
        return self._manager.save(step, args=self._args.StandardSave(state))

    def wait(self) -> None:
        self._manager.wait_until_finished()

    def restore(self) -> dict[str, Any]:
        return self._manager.restore(self._manager.latest_step(), args=self._args.StandardRestore(self._like))


CONTESTANTS: dict[str, type[Contestant]] = {"replicax": Replicax, "orbax": Orbax}


# --- the training -----------------------------------------------------------------------------------------


@final
class Training:
    """A state, and a step that replaces it.

    Args:
      megabytes: The size of the state.
      folder: Gets a line for each step.
    """

    def __init__(self, megabytes: float, folder: str):
        import jax
        import jax.numpy as jnp

        mesh = jax.make_mesh((jax.device_count(),), ("part",), axis_types=(jax.sharding.AxisType.Auto,))
        part = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("part"))
        same = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        rows = int(megabytes * 2**20 / NUM_ARRAYS / 4 / COLUMNS)
        self._first = np.random.default_rng(0).random((rows, COLUMNS), np.float32)

        def made(index: Any) -> np.ndarray:
            return self._first[index]

        self.state = {
            name: jax.jit(lambda x: x + 0)(jax.make_array_from_callback((rows, COLUMNS), part, made))
            for name in NAMES
        }
        zero = np.zeros((), np.int32)
        self.state["step"] = jax.make_array_from_callback((), same, lambda index: zero)
        self._log = os.open(
            os.path.join(folder, f"steps-{jax.process_index()}"), os.O_CREAT | os.O_APPEND | os.O_WRONLY
        )

        def step(state: dict[str, Any]) -> tuple[dict[str, Any], Any]:
            new = {name: state[name] * RATE + SHIFT for name in NAMES}
            # As in training, no process is a step ahead of the others.
            return {**new, "step": state["step"] + 1}, jnp.sum(new[NAMES[0]][:, 0])

        self._step = jax.jit(step, donate_argnums=0)

    @property
    def own_bytes(self) -> int:
        """The size of what this process's devices hold."""
        return sum(shard.data.nbytes for array in self.state.values() for shard in array.addressable_shards)

    def step(self) -> int:
        import jax

        self.state, loss = self._step(self.state)
        jax.block_until_ready((self.state, loss))
        return int(self.state["step"])

    def note(self, step: int, *, is_saved: bool) -> None:
        os.write(self._log, f"{step} {int(is_saved)}\n".encode())

    def check(self, state: dict[str, Any]) -> int:
        """Returns the step of a restored state, whose values must be those of that step."""
        step, here = int(state["step"]), self._first[:2].copy()
        for _ in range(step):
            here = here * RATE + SHIFT
        for name in NAMES:
            shard = state[name].addressable_shards[0]
            if not shard.index[0].start:
                assert np.allclose(np.asarray(shard.data[:2]), here, rtol=1e-4, atol=1e-6), name
        return step


def resident(name: str) -> int:
    """Returns a line of ``/proc/self/status``, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))


def forget_peak() -> None:
    """Gives unused memory back, and makes the peak begin at what is used now."""
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def dd(source: str, target: str) -> float:
    """Returns the seconds in which ``dd`` copies a file and syncs it."""
    began = time.perf_counter()
    command = ["dd", f"if={source}", f"of={target}", "bs=4M", "conv=fsync", "status=none"]
    subprocess.run(command, check=True)
    took = time.perf_counter() - began
    os.remove(target)
    return took


def timed(action: Callable[[], Any]) -> tuple[float, Any]:
    began = time.perf_counter()
    result = action()
    return time.perf_counter() - began, result


def save(training: Training, contestant: Contestant, setting: dict[str, Any]) -> dict[str, Any]:
    """Saves with steps beside it, for stalls and memory; then without, for the speed of writing."""
    for _ in range(3):
        training.step()
    own = training.own_bytes
    forget_peak()
    before = resident("VmRSS")
    contestant.open(os.path.join(setting["folder"], SAVED), training.state)
    for _ in range(NUM_STEPS_BEFORE):
        training.step()
    passes: list[tuple[float, float, bool]] = []
    while sum(began for *_, began in passes) < setting["num_saves"] + 1:
        step_s, step = timed(training.step)
        call_s, is_saved = timed(lambda step=step: contestant.save(step, training.state))
        training.note(step, is_saved=is_saved)
        passes.append((step_s, call_s, is_saved))
    contestant.wait()
    memory = resident("VmHWM") - before
    writes, copies = [], []
    for _ in range(setting["num_writes"]):
        if setting["index"] == 0:
            copies.append(dd(setting["source"], os.path.join(setting["folder"], "dd")))
        step = training.step()
        began = time.perf_counter()
        is_saved = contestant.save(step, training.state)
        contestant.wait()
        if is_saved:
            writes.append(time.perf_counter() - began)
        training.note(step, is_saved=is_saved)
    return {"own": own, "memory": memory, "passes": passes, "writes": writes, "dd": copies}


def main() -> None:
    ctypes.CDLL(None).prctl(_END_WITH_PARENT, signal.SIGKILL)
    setting = json.loads(sys.argv[1])
    contestant = CONTESTANTS[setting["contestant"]]()
    if len(setting["addresses"]) > 1:
        contestant.join(setting["index"], setting["addresses"])
    import jax

    training = Training(setting["megabytes"], setting["folder"])
    contestant.load()
    if setting["task"] == "restore":
        contestant.open(os.path.join(setting["folder"], SAVED), training.state)
        forget_peak()
        before = resident("VmRSS")
        seconds, state = timed(lambda: jax.block_until_ready(contestant.restore()))
        report = {"seconds": seconds, "memory": resident("VmHWM") - before, "step": training.check(state)}
        training.state = state
        report["first_step_s"], _ = timed(training.step)
        report["step_s"], _ = timed(training.step)
        print(json.dumps(report), flush=True)
        os._exit(0)
    print(json.dumps(save(training, contestant, setting)), flush=True)
    while True:  # until it is killed
        step = training.step()
        training.note(step, is_saved=contestant.save(step, training.state))


if __name__ == "__main__":
    main()

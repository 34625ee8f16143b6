"""``growth_processes.py`` launches this: a step, a hundred more, the end, and what they took in this process."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "jax"

import json
import time
from typing import Any

import jax

import models
import replicax as rx
from replicax._src.cluster import channel

SIZES, ROWS, NUM_STEPS = (64, 256, 256, 10), 64, 100

counts = {"messages": 0, "bytes": 0}
is_training = False


def counted(name: str) -> None:
    """Counts the messages that a function of the control channel sends or receives.

    Heartbeats, and the answers to them, count only in training: at the start their number is that of the seconds, and
    many processes share the cores of this machine.
    """
    function = getattr(channel, name)

    def count(*arguments: Any, **options: Any) -> Any:
        result = function(*arguments, **options)
        message = result if name == "receive" else arguments[1]
        if is_training or message["kind"] not in ("heartbeat", "pulse"):
            counts["messages"] += 1
            counts["bytes"] += len(json.dumps(message))
        return result

    setattr(channel, name, count)


if __name__ == "__main__":
    counted("send")
    counted("receive")
    strategy = rx.MultiWorkerMirroredStrategy()
    step = models.keras_step(strategy, SIZES, ROWS)
    batch = models.distributed_batch(strategy, SIZES, ROWS)

    def run() -> None:
        jax.block_until_ready(strategy.experimental_local_results(strategy.run(step, args=(batch,))))

    run()
    values = {
        "start-up and first step of a process, processor time": time.process_time(),
        "start-up of a process: messages on the control channel": float(counts["messages"]),
        "start-up of a process: bytes on the control channel": float(counts["bytes"]),
    }
    is_training = True
    before, seconds = dict(counts), time.monotonic()
    for _ in range(NUM_STEPS):
        run()
    took_s = max(1.0, time.monotonic() - seconds)
    values["training: messages of a process in a second"] = (counts["messages"] - before["messages"]) / took_s
    print("growth: " + json.dumps(values), flush=True)

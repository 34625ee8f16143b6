"""``multi_worker.py`` launches this to time a job up to its first step: an MLP, one step, the time of day."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import time

import jax

import models
import replicax as rx

SIZES, ROWS = (64, 256, 256, 10), 128

if __name__ == "__main__":
    strategy = rx.MultiWorkerMirroredStrategy()
    step = models.keras_step(strategy, SIZES, ROWS)
    loss = strategy.run(step, args=(models.distributed_batch(strategy, SIZES, ROWS),))
    jax.block_until_ready(strategy.experimental_local_results(loss))
    print(f"first step ended at {time.time():.3f}", flush=True)

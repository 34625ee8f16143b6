"""Threads train and read the same variables, in a separate process, because a mistake here ends the process."""

import collections
import os
import subprocess
import sys
import threading

import pytest

STEPS = 200


@pytest.mark.rest
@pytest.mark.parametrize(
    ("num_replicas", "num_trainers"), [(1, 2), pytest.param(2, 1, marks=pytest.mark.long), (2, 3)]
)
def test_no_step_is_lost_and_no_read_fails(num_replicas, num_trainers):
    command = [sys.executable, __file__, str(num_replicas), str(num_trainers)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=200, env=os.environ)
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == [str(float(num_trainers * STEPS))]


def main(num_replicas, num_trainers):
    import jax.numpy as jnp
    import numpy as np

    import replicax as rx

    rx.config.set_local_devices(2)
    strategy = rx.MirroredStrategy([f"cpu:{i}" for i in range(num_replicas)])
    with strategy.scope():
        variables = [rx.Variable(np.zeros(100, "f")) for _ in range(5)]
    errors = collections.Counter()
    is_over = threading.Event()

    def train():
        for _ in range(STEPS):
            strategy.run(lambda: [v.assign_add(jnp.ones(100)) for v in variables])

    def read():
        while not is_over.is_set():
            for v in variables:
                np.asarray(v.value)

    def noting(work):
        try:
            work()
        except BaseException as error:
            errors[repr(error)] += 1

    trainers = [threading.Thread(target=noting, args=(train,)) for _ in range(num_trainers)]
    reader = threading.Thread(target=noting, args=(read,))
    for thread in [*trainers, reader]:
        thread.start()
    for thread in trainers:
        thread.join()
    is_over.set()
    reader.join()
    assert not errors, errors
    print(float(variables[0].value[0]))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

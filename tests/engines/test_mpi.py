"""Jobs that the system's mpirun starts; their collectives are gloo's."""

import contextlib
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from checks import path_of_programs

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.skipif(shutil.which("mpirun") is None, reason="needs mpirun: apt-get install openmpi-bin"),
]

# The guide's program.
TRAIN = re.search(
    r"```python\n(# train\.py\n.*?)```", (ROOT / "docs/how_to/several_machines.md").read_text(), re.DOTALL
)[1]

RESUME = """
import hashlib, os, signal, sys
import jax.numpy as jnp
import numpy as np
import replicax as rx

folder, victim, step_of_death = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
strategy = rx.MultiWorkerMirroredStrategy()
worker = strategy.cluster_resolver.task_id
rng = np.random.default_rng(0)
rows = rng.standard_normal((96, 8)).astype(np.float32)
dataset = rx.data.from_arrays((rows, rows[:, :1])).shuffle(seed=1).repeat().batch(10)
batches = iter(strategy.experimental_distribute_dataset(dataset))
with strategy.scope():
    step = rx.Variable(0)
    weights, velocity = (rx.Variable(rng.standard_normal((8, 1)).astype(np.float32)) for _ in range(2))
manager = rx.CheckpointManager(
    rx.Checkpoint(step=step, weights=weights, velocity=velocity, batches=batches), folder, max_to_keep=2
)
manager.restore_or_initialize()
first = int(step)


def train_step(batch):
    features, labels = batch
    with rx.GradientTape() as tape:
        loss = rx.nn.compute_average_loss(jnp.square(features @ weights - labels)[:, 0])
    gradient = rx.get_replica_context().all_reduce("SUM", tape.gradient(loss, weights))
    velocity.assign(0.9 * velocity - 0.1 * gradient)
    weights.assign_add(velocity)
    step.assign_add(1)


while int(step) < 20:
    if worker == victim and int(step) == step_of_death:
        os.kill(os.getpid(), signal.SIGKILL)
    strategy.run(train_step, args=(next(batches),))
    if int(step) % 5 == 0:
        manager.save()
        manager.wait()  # a thread writes it
digest = hashlib.sha256(weights.numpy().tobytes() + velocity.numpy().tobytes()).hexdigest()[:16]
sys.stdout.write(f"worker {worker} began at {first}, ended at {int(step)}: {digest}\\n")  # in one piece
"""

FAULTS = """
import logging, os, signal, sys
import numpy as np
import replicax as rx

logging.getLogger("replicax").addHandler(logging.StreamHandler())
logging.getLogger("replicax").setLevel(logging.INFO)
fault, victim = sys.argv[1:]
strategy = rx.MultiWorkerMirroredStrategy()
is_victim = strategy.cluster_resolver.task_id == int(victim)
numbers = strategy.experimental_distribute_values_from_function(
    lambda context: np.arange(3, dtype=np.float32) + context.replica_id_in_sync_group
)
for step in range(30):
    if step == 20 and is_victim and fault == "raises":
        raise ValueError("a mistake of my own")
    if step == 20 and is_victim and fault == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    total = strategy.reduce("SUM", numbers, axis=None)
sys.stdout.write(f"total {np.asarray(total).tolist()}\\n")  # in one piece: mpirun mixes pieces
sys.stdout.flush()
sys.exit(5 * (fault == "code"))
"""


@pytest.fixture
def mpirun(tmp_path):
    """Runs a program in n processes of mpirun, or without it (0), in an empty folder; returns what it printed."""

    def run(program, n, *arguments, code=0, **environment):
        (tmp_path / "program.py").write_text(program)
        launcher = ["mpirun", "--allow-run-as-root", "--oversubscribe", "-n", str(n)] if n else []
        job = subprocess.Popen(
            [*launcher, sys.executable, "program.py", *map(str, arguments)],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": path_of_programs(ROOT / "src"),
                "JAX_PLATFORMS": "cpu",
                **environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        try:
            printed, _ = job.communicate(timeout=300)
        finally:  # SIGTERM: mpirun ends its ranks, which are in process groups of their own
            job.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(30)
            job.kill()
        assert job.returncode == code, printed
        return printed

    return run


@pytest.fixture(scope="module")
def once():
    """Runs what several tests compare with the first time only."""
    printed = {}

    def run(name, program):
        if name not in printed:
            printed[name] = program()
        return printed[name]

    return run


def losses_of(printed):
    return re.findall(r"worker \w+: (\[.*?\])", printed)


def test_keras_has_the_losses_of_one_process(mpirun):
    (alone,) = losses_of(mpirun(TRAIN, 0))
    assert losses_of(mpirun(TRAIN, 4)) == [alone] * 4


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_ends_the_job_and_the_next_resumes_with_bit_equal_weights(mpirun, once, victim):
    undisturbed = once("undisturbed", lambda: mpirun(RESUME, 2, "undisturbed", -1, -1))
    digest = re.search(r"began at 0, ended at 20: (\w+)", undisturbed)[1]
    killed = mpirun(RESUME, 2, "checkpoints", victim, 13, code=128 + 9)
    assert "ended at" not in killed
    resumed = mpirun(RESUME, 2, "checkpoints", -1, -1)
    assert sorted(re.findall(r"worker \d began.*", resumed)) == [
        f"worker {worker} began at 10, ended at 20: {digest}" for worker in range(2)
    ]


def test_workers_communicate_by_gloo_and_the_exit_code_is_kept(mpirun):
    printed = mpirun(FAULTS, 2, "code", 0, code=5)
    # mpirun may lose the last lines of the other process when it ends it.
    assert "total [1.0, 3.0, 5.0]" in printed
    assert printed.count("collectives by gloo; sums by ") == 2


@pytest.mark.parametrize(
    ("fault", "num_processes", "victim", "code"),
    [("raises", 2, 0, 1), ("raises", 2, 1, 1), ("killed", 4, 0, 128 + 9)],
)
def test_end_of_one_process_ends_all(mpirun, fault, num_processes, victim, code):
    printed = mpirun(FAULTS, num_processes, fault, victim, code=code)
    assert "total [" not in printed
    if fault == "raises":
        assert "ValueError: a mistake of my own" in printed


def test_collectives_by_mpi_are_refused(mpirun):
    printed = mpirun(FAULTS, 2, "none", 0, code=1, JAX_CPU_COLLECTIVES_IMPLEMENTATION="mpi")
    assert "replicax no longer has collectives by MPI" in printed

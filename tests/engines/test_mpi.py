"""Jobs that the system's mpirun starts: collectives by gloo, and by MPI through the library that the command builds."""

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

# The collectives of JAX with the dtypes that XLA gives to MPI. Small whole numbers: all of them are exact.
COLLECTIVES = """
import sys
import jax
import numpy as np
import replicax as rx

strategy = rx.MultiWorkerMirroredStrategy()
n, rank = jax.process_count(), jax.process_index()
P = jax.sharding.PartitionSpec
auto = (jax.sharding.AxisType.Auto,) * 2
mesh, grid = jax.make_mesh((n, 1), ("r", "one"), auto), jax.make_mesh((n // 2, 2), ("pair", "r"), auto)
rows = np.random.default_rng(0).integers(0, 3, (n, 8 * n))
pairs = rows.reshape(n // 2, 2, -1).sum(1).repeat(2, axis=0)
cases = {
    "psum": (mesh, lambda x: jax.lax.psum(x, "r"), rows.sum(0, keepdims=True).repeat(n, 0)),
    "psum of pairs": (grid, lambda x: jax.lax.psum(x, "r"), pairs),
    "pmax": (mesh, lambda x: jax.lax.pmax(x, "r"), rows.max(0, keepdims=True).repeat(n, 0)),
    "pmin": (mesh, lambda x: jax.lax.pmin(x, "r"), rows.min(0, keepdims=True).repeat(n, 0)),
    "psum_scatter": (
        mesh, lambda x: jax.lax.psum_scatter(x, "r", scatter_dimension=1, tiled=True), rows.sum(0).reshape(n, 8)
    ),
    "all_gather": (mesh, lambda x: jax.lax.all_gather(x, "r", axis=1, tiled=True), rows.reshape(1, -1).repeat(n, 0)),
    "all_to_all": (
        mesh,
        lambda x: jax.lax.all_to_all(x.reshape(1, n, -1), "r", 1, 0).reshape(1, -1),
        rows.reshape(n, n, -1).swapaxes(0, 1).reshape(n, -1),
    ),
    "ppermute": (mesh, lambda x: jax.lax.ppermute(x, "r", [(i, (i + 1) % n) for i in range(n)]), np.roll(rows, 1, 0)),
}
wrong, checked = [], 0
jax.config.update("jax_enable_x64", True)
for dtype in sys.argv[1].split(","):
    for name, (over, collective, expected) in cases.items():
        if dtype.startswith("complex") and name in ("pmax", "pmin"):
            continue  # not in XLA
        spec = P(("pair", "r")) if over is grid else P("r")
        place = jax.sharding.NamedSharding(over, spec)
        x = jax.make_array_from_callback(rows.shape, place, lambda index: rows[index].astype(dtype))
        compute = jax.jit(jax.shard_map(collective, mesh=over, in_specs=spec, out_specs=spec, check_vma=False))
        (mine,) = compute(x).addressable_shards
        is_right = mine.data.dtype == dtype and np.array_equal(
            np.asarray(mine.data).astype(np.complex64)[0], expected[rank]
        )
        checked += 1
        wrong += [] if is_right else [f"{dtype} {name}"]
sys.stdout.write(f"rank {rank}: {checked} checked, wrong: {wrong}\\n")
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
def library(tmp_path_factory):
    """The library through which JAX reaches MPI, as the command builds it."""
    if shutil.which("mpicc") is None:
        pytest.skip("needs mpicc: apt-get install libopenmpi-dev gcc")
    path = tmp_path_factory.mktemp("mpi") / "libmpiwrapper.so"
    done = subprocess.run(
        [sys.executable, "-m", "replicax", "mpi-collectives", "build", str(path)],
        env={**os.environ, "PYTHONPATH": path_of_programs(ROOT / "src")},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert f"export MPITRAMPOLINE_LIB={path} JAX_CPU_COLLECTIVES_IMPLEMENTATION=mpi" in done.stdout
    return path


@pytest.fixture(scope="module")
def once():
    """Runs what several tests compare with the first time only."""
    printed = {}

    def run(name, program):
        if name not in printed:
            printed[name] = program()
        return printed[name]

    return run


def by_mpi(library):
    return {"MPITRAMPOLINE_LIB": str(library), "JAX_CPU_COLLECTIVES_IMPLEMENTATION": "mpi"}


def losses_of(printed):
    return re.findall(r"worker \w+: (\[.*?\])", printed)


@pytest.mark.parametrize(("collectives", "num_processes"), [("gloo", 4), ("mpi", 2)])
def test_keras_has_the_losses_of_one_process(mpirun, once, request, collectives, num_processes):
    environment = by_mpi(request.getfixturevalue("library")) if collectives == "mpi" else {}
    (alone,) = losses_of(once("alone", lambda: mpirun(TRAIN, 0)))
    assert losses_of(mpirun(TRAIN, num_processes, **environment)) == [alone] * num_processes


@pytest.mark.parametrize(("collectives", "victim"), [("gloo", 0), ("gloo", 1), ("mpi", 1)])
def test_killed_rank_ends_the_job_and_the_next_resumes_with_bit_equal_weights(
    mpirun, once, request, collectives, victim
):
    environment = by_mpi(request.getfixturevalue("library")) if collectives == "mpi" else {}
    undisturbed = once(collectives, lambda: mpirun(RESUME, 2, "undisturbed", -1, -1, **environment))
    digest = re.search(r"began at 0, ended at 20: (\w+)", undisturbed)[1]
    killed = mpirun(RESUME, 2, "checkpoints", victim, 13, code=128 + 9, **environment)
    assert "ended at" not in killed
    resumed = mpirun(RESUME, 2, "checkpoints", -1, -1, **environment)
    assert sorted(re.findall(r"worker \d began.*", resumed)) == [
        f"worker {worker} began at 10, ended at 20: {digest}" for worker in range(2)
    ]


# --- collectives by MPI ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_processes", [2, 4])
def test_every_collective_is_exact_by_mpi(mpirun, library, num_processes):
    dtypes = "bfloat16,float32,int32" if num_processes > 2 else (
        "int8,uint8,int16,uint16,int32,uint32,int64,uint64,bfloat16,float32,float64,complex64,complex128"
    )  # fmt: skip
    printed = mpirun(COLLECTIVES, num_processes, dtypes, **by_mpi(library))
    found = sorted(re.findall(r"rank \d: (\d+) checked, wrong: (.*)", printed))
    assert len(found) == num_processes, printed
    assert all(int(checked) > 20 and wrong == "[]" for checked, wrong in found), printed


def test_the_exit_code_is_kept(mpirun, library):
    printed = mpirun(FAULTS, 2, "code", 0, code=5, **by_mpi(library))
    # mpirun may lose the last lines of the other process when it ends it.
    assert "total [1.0, 3.0, 5.0]" in printed
    assert printed.count("collectives by MPI.") == 2
    assert "MPI_FINALIZE" not in printed


@pytest.mark.parametrize(
    ("fault", "num_processes", "victim", "code"),
    [("raises", 2, 0, 1), ("raises", 2, 1, 1), ("killed", 4, 0, 128 + 9)],
)
def test_end_of_one_process_ends_all(mpirun, library, fault, num_processes, victim, code):
    printed = mpirun(FAULTS, num_processes, fault, victim, code=code, **by_mpi(library))
    assert "total [" not in printed
    if fault == "raises":
        assert "ValueError: a mistake of my own" in printed


def test_two_devices_in_a_process_are_an_error(mpirun, library):
    printed = mpirun(FAULTS, 2, "none", 0, code=1, JAX_NUM_CPU_DEVICES="2", **by_mpi(library))
    assert "ClusterStartError: Each worker has 2 CPU devices" in printed

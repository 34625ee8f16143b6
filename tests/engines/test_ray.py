"""``rx.ray`` on a real Ray cluster of three nodes: a guide's program, a killed worker, a lost node, a preempted node,
and parameter servers."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="Ray is not installed; make test-engines installs it")

import jax.numpy as jnp

import replicax as rx
from engines.ray_cluster import RayCluster
from engines.watching import Watching
from replicax._src.cluster.machine_layout import free_ports

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RAYS_OWN = {
    # The machine may be busy with other work, and Ray's own limit is short.
    "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "240",
    # How often it looks for preempted nodes, ended workers, and lost nodes, which five looks must find.
    "RAY_TRAIN_PREEMPTION_POLL_INTERVAL_S": "1",
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5",
    "RAY_health_check_period_ms": "500",
}

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="session")
def one_cluster():
    path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", path)
        for name, value in RAYS_OWN.items():
            patch.setenv(name, value)
        cluster = RayCluster()
        yield cluster
        cluster.close()


@pytest.fixture
def cluster(one_cluster):
    """The cluster, with all three nodes again."""
    one_cluster.ask("fill", timeout_s=180)
    return one_cluster


def results(output):
    return [json.loads(line) for line in re.findall(r"^RESULT (.*)$", output, re.MULTILINE)]


def steps(cluster, folder, variables=(), **config):
    """Trains in steps on Ray. Returns the result, what worker 1 noted of each start, and the output."""
    given = json.dumps({"checkpoints": str(folder / "checkpoints"), **config})
    code, output = cluster.run(HERE / "ray_steps.py", given, timeout_s=600, **dict(variables))
    assert code == 0, output
    notes = [json.loads(line) for line in (folder / "starts").read_text().splitlines()]
    return (results(output) or [None])[0], notes, output


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits of the weights after a training of two workers without Ray, and without faults."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = json.dumps({"checkpoints": str(folder / "checkpoints")})
    command = [sys.executable, "-m", "replicax", "launch", "--workers", "2", "--devices-per-worker", "1"]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    done = subprocess.run(
        [*command, str(HERE / "ray_steps.py"), config],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    bits = {int(each) for each in re.findall(r'"bits": (\d+)', done.stdout)}
    assert len(bits) == 1
    return bits.pop()


def test_keras_program_has_the_losses_of_one_process(cluster, tmp_path):
    code, output = cluster.run(
        ROOT / "examples" / "cluster" / "ray_train.py", "--storage", tmp_path, timeout_s=600
    )
    assert code == 0, output
    # docs/how_to/several_machines.md: the losses of one process
    assert "losses: [0.5457, 0.4918, 0.4448]" in output


def test_training_resumes_after_a_kill_a_lost_node_and_a_preemption(cluster, tmp_path, undisturbed):
    """The preemption does not count: two failures are allowed. `replicax top` shows all of it."""
    faults = {"kill": 7, "lose": 12, "drain": 17}
    address = f"127.0.0.1:{free_ports(1)[0]}"
    status = {"REPLICAX_STATUS_ADDRESS": address, "REPLICAX_TOKEN": "of-this-job"}
    with Watching(address, "of-this-job") as top:
        result, notes, output = steps(cluster, tmp_path, status, faults=faults, max_failures=2, reports=True)
    assert top.shows_all(restarts=2), top.statuses[-5:]  # while the node is taken away
    assert [(note["start"], note["then"]) for note in notes] == [
        (0, "kill"),
        (1, "lose"),
        (2, "drain"),
        (3, "end"),
    ], output
    first = [note["first"] for note in notes]
    assert first[:3] == [0, 5, 10]
    assert 17 <= first[3] < 24  # it saved between two regular checkpoints
    assert len({note["pid"] for note in notes}) == 4
    assert "is preempted (Ray takes its node away): all tasks save before their next step." in output
    assert (result["bits"], result["start"]) == (undisturbed, 3)
    # Ray has a copy of the newest checkpoint that was reported.
    assert Path(result["checkpoint"]).is_relative_to(tmp_path / "run")
    assert any(Path(result["checkpoint"]).iterdir())
    assert result["metrics"]["step"] == 20


def test_a_workers_own_error_is_raised(cluster, tmp_path):
    _, _, output = steps(cluster, tmp_path, faults={"raise": 3}, devices=2)
    assert "RAISED ArithmeticError('a mistake of worker 1') from WorkerGroupError" in output


def test_tune_searches_and_names_the_checkpoint_of_the_best_trial(cluster, tmp_path):
    given = json.dumps({"checkpoints": str(tmp_path / "checkpoints"), "learning_rates": [1e-6, 0.05]})
    code, output = cluster.run(HERE / "ray_steps.py", given, timeout_s=600)
    assert code == 0, output
    assert set(re.findall(r"DEVICES (\d+)", output)) == {"2"}
    bad, good, best = results(output)
    assert (bad[0], good[0]) == (1e-6, 0.05)
    assert good == best
    assert good[1] < bad[1]
    # Ray's copy of the last checkpoint is complete.
    saved = rx.Checkpoint(weights=rx.Variable(jnp.zeros(8)))
    saved.restore(best[2]).expect_partial()
    assert float(jnp.abs(saved.weights.value).max()) > 0


def test_parameter_servers_count_exactly_through_lost_actors_and_a_lost_node(cluster):
    code, output = cluster.run(HERE / "ray_servers.py", "replicated", timeout_s=600)
    assert code == 0, output
    assert re.findall(r"^(?:COUNTED|SEEN) .*$", output, re.MULTILINE) == [
        "COUNTED 300.0",
        "COUNTED 600.0",
        "SEEN worker 1 again",
        "COUNTED 900.0",
        "SEEN two copies again",
        "COUNTED 1200.0",
    ], output


def test_parameter_server_on_another_node_reads_its_snapshot_and_says_what_is_lost(cluster, tmp_path):
    code, output = cluster.run(HERE / "ray_servers.py", "snapshots", tmp_path, timeout_s=600)
    assert code == 0, output
    counted = [float(number) for number in re.findall(r"^COUNTED (.*)$", output, re.MULTILINE)]
    assert counted[0] == 300
    (num_lost,) = re.findall(r"ps 0 restarted from its last snapshot.*: about (\d+) updates", output)
    # Counting goes on while the node is lost, so that the number is that of its last heartbeat.
    assert 600 - 100 <= counted[1] <= 600 - int(num_lost), output


def test_nothing_is_left_behind(one_cluster):
    """The last test: the cluster is closed."""
    folder = one_cluster.folder
    one_cluster.close()
    assert not folder.exists()
    left = [
        text
        for path in Path("/proc").glob("[0-9]*/cmdline")
        for text in [read(path).replace("\0", " ")]
        if str(folder) in text
    ]
    assert not left


def read(path):
    try:
        return path.read_text(errors="replace")
    except OSError:  # the process has ended
        return ""

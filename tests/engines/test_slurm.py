"""``replicax launch --on slurm`` on a real Slurm: a job starts, fails, loses a node, is preempted and resumes, bit for bit."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from engines import slurm_cluster
from engines.watching import Watching
from launched_jobs import LaunchedJob, environment, fitting, write_script
from replicax._src.cluster.machine_layout import free_ports

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(slurm_cluster.missing()), reason=slurm_cluster.missing() or "it is there"),
]
GUIDE = Path(__file__).parents[2] / "docs" / "how_to" / "several_machines.md"
LOSSES = "[0.5457, 0.4918, 0.4448]"  # that the guide prints for one process
ARGUMENTS = "epochs=3, pause_s=0.1"
REPLICAX = (sys.executable, "-m", "replicax")


@pytest.fixture(scope="module")
def whole_cluster(tmp_path_factory):
    cluster = slurm_cluster.SlurmCluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.close()
    assert not cluster.processes()


@pytest.fixture
def cluster(whole_cluster):
    yield whole_cluster
    whole_cluster.end_jobs()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The bits of the weights, the optimizer and the history after the training that the tests disturb."""
    with LaunchedJob(tmp_path_factory.mktemp("undisturbed"), fitting, ARGUMENTS) as job:
        assert job.wait(300) == 0, job.text()
        bits = {bits for _, bits in job.printed("bits")}
    assert len(bits) == 1
    return bits


class Job:
    """`replicax launch --on slurm` as a process, whose output lies in a file."""

    def __init__(self, cluster, folder, *arguments, **variables):
        self._cluster, self._path = cluster, folder / "launcher.txt"
        self.saved = folder / "saved"
        with self._path.open("w") as output:
            self.launcher = subprocess.Popen(
                [*REPLICAX, "launch", "--on", "slurm", "--nodes", "2", *arguments],
                cwd=folder,
                env=environment()
                | cluster.environ
                | {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", **variables},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def text(self):
        return self._path.read_text()

    @property
    def number(self):
        return self.wait_for(r"Submitted job (\d+)")[0]

    def wait_for(self, pattern, count=1, timeout_s=300):
        """The groups of the first so many matches in the output, when they are there."""
        deadline = time.monotonic() + timeout_s
        while len(found := re.findall(pattern, self.text(), re.MULTILINE)) < count:
            assert self.launcher.poll() is None, self.text()
            assert time.monotonic() < deadline, f"no {pattern!r}\n{self.text()}"
            time.sleep(0.05)
        return found

    def wait_for_state(self, state, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while self._cluster.state(self.number) != state:
            assert time.monotonic() < deadline, f"not {state}\n{self.text()}"
            time.sleep(0.05)

    def wait_for_checkpoint(self, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while not [path for path in self.saved.glob("ckpt-*") if ".part-" not in path.name]:
            assert self.launcher.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.05)

    def wait(self, timeout_s=600):
        return self.launcher.wait(timeout_s)

    def bits(self):
        return set(re.findall(r"^\d: bits (\w+)$", self.text(), re.MULTILINE))


@pytest.fixture
def submit(cluster, tmp_path):
    """Submits the training that the tests disturb."""
    with contextlib.ExitStack() as stack:

        def submit(*options, arguments=ARGUMENTS, **variables):
            script = write_script(tmp_path, fitting, arguments)
            job = Job(cluster, tmp_path, *options, "--checkpoint-dir", "saved", script.name, **variables)
            stack.callback(job.launcher.wait)
            stack.callback(job.launcher.kill)
            return job

        yield submit


def test_keras_trains_as_in_one_process(cluster, tmp_path):
    program = re.search(r"```python\n(# train.py\n.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    (tmp_path / "train.py").write_text(program)
    job = Job(cluster, tmp_path, "train.py")
    assert job.wait() == 0, job.text()
    assert sorted(re.findall(r"^\d: worker .*", job.text(), re.MULTILINE)) == [
        f"0: worker 0: {LOSSES}",
        f"1: worker 1: {LOSSES}",
    ]
    assert "[Gloo]" not in job.text()
    # As a user's own batch script starts it.
    done = subprocess.run(
        ["srun", "--nodes=2", "--ntasks=2", "--label", *REPLICAX, "run", "train.py"],
        cwd=tmp_path,
        env=environment() | cluster.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count(LOSSES) == 2


def test_a_killed_task_restarts_all_on_the_same_nodes_and_top_shows_them_before_and_after(
    submit, undisturbed
):
    token = "of-this-job"
    status = {"REPLICAX_STATUS_ADDRESS": f"0.0.0.0:{free_ports(1)[0]}", "REPLICAX_TOKEN": token}
    status["REPLICAX_PROGRESS"] = "1"  # it says where the status is
    job = submit("--max-restarts", "1", arguments="epochs=3, pause_s=0.25", **status)
    pids = dict(job.wait_for(r"^(\d): pid (\d+)", 2))
    # The job says where.
    with Watching(job.wait_for(r"^0: replicax: Status: \S+ and replicax top (\S+)$")[0], token) as top:
        top.wait_for_all(restarts=0)
        assert any(re.match(r'replicax_loss\{task="worker 1"\} \d', line) for line in top.metrics())
        job.wait_for_checkpoint()
        os.kill(int(pids["1"]), signal.SIGKILL)
        top.wait_for_all(restarts=1)
        assert job.wait() == 0, job.text()
    assert (
        "with exit code 137. Starting them again: there is a new checkpoint; this is not counted."
        in job.text()
    )
    assert "start 2" not in job.text()  # Slurm did not start the job again
    assert job.bits() == undisturbed, job.text()


def test_a_lost_node_requeues_the_job(cluster, submit, undisturbed):
    job = submit("--max-restarts", "1")
    job.wait_for_checkpoint()
    cluster.lose_node(slurm_cluster.NODES[1])
    job.wait_for_state("PENDING")
    cluster.start_node(slurm_cluster.NODES[1])
    assert job.wait() == 0, job.text()
    assert job.bits() == undisturbed, job.text()


def test_a_job_of_higher_priority_preempts_it(cluster, submit, undisturbed):
    job = submit("--partition", "low")
    job.wait_for_checkpoint()
    urgent = [
        "--partition=high",
        "--nodes=2",
        "--exclusive",
        "--output=/dev/null",
        "--parsable",
        "--wrap=sleep 2",
    ]
    number = cluster.ask("sbatch", *urgent)
    assert job.wait() == 0, job.text()
    assert cluster.state(number) == "COMPLETED"
    assert "with exit code 42. Requeueing the job: they have saved, so this is not counted." in job.text()
    assert job.bits() == undisturbed, job.text()


def test_sigterm_before_python_listens_and_while_it_trains(cluster, submit, undisturbed):
    job = submit("--max-restarts", "1")
    job.wait_for(r"^\d: pid", 2)  # it imports JAX and Keras now
    cluster.ask("scancel", "--signal=TERM", job.number)
    job.wait_for("with exit code 143. Requeueing the job: restart 1 of 1.")
    job.wait_for_checkpoint()
    cluster.ask("scancel", "--signal=TERM", job.number)
    assert job.wait() == 0, job.text()
    assert job.text().count("with exit code 42. Requeueing the job") == 1
    assert job.bits() == undisturbed, job.text()


def test_ctrl_c_cancels_the_job(cluster, submit):
    """Its tasks save and end with 42, and yet it is not requeued."""
    job = submit()
    job.wait_for_checkpoint()
    job.launcher.send_signal(signal.SIGINT)
    assert job.wait() == 130, job.text()
    assert f"Cancelling job {job.number}. Its tasks get SIGTERM." in job.text()
    assert cluster.state(job.number) == "CANCELLED"
    assert "Requeueing" not in job.text()


def test_a_failure_is_the_exit_code_of_the_launcher(cluster, tmp_path):
    (tmp_path / "fails.py").write_text("raise SystemExit(3)\n")
    job = Job(cluster, tmp_path, "--max-restarts", "1", "fails.py")
    assert job.wait() == 3
    assert "Starting them again: restart 1 of 1.\n" in job.text()
    assert "The tasks ended with exit code 3. No restarts are left.\n" in job.text()

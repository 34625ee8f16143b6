"""``replicax doctor``: its output for healthy clusters and for broken ones."""

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

import replicax as rx
from checks import message
from replicax.__main__ import main
from replicax._launch import answers
from replicax._launch.answers import ask_channel, ask_until
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.machine_layout import free_ports
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.wire.security import Security
from replicax.errors import ClusterStartError

pytestmark = pytest.mark.timeout(250)
LAUNCHERS = [
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "SM_HOSTS",
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "REPLICAX_ROUTES",
    "JAX_CPU_COLLECTIVES_IMPLEMENTATION",
]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``doctor(config, *options)``: the exit code and the output with that TF_CONFIG."""
    for name in LAUNCHERS:
        monkeypatch.delenv(name, raising=False)

    def run(config=None, *options):
        if config is not None:
            monkeypatch.setenv("TF_CONFIG", config if isinstance(config, str) else json.dumps(config))
        code = main(["doctor", "--no-devices", *options])
        return code, capsys.readouterr().out

    return run


def config_of(*addresses, index=0):
    return {"cluster": {"worker": list(addresses)}, "task": {"type": "worker", "index": index}}


@pytest.fixture
def free():
    """Different addresses at which no process listens."""
    ports = iter(free_ports(20))
    return lambda: f"127.0.0.1:{next(ports)}"


def test_single_worker(doctor):
    code, printed = doctor()
    assert code == 0
    assert "Nothing in the environment" in printed
    assert "TF_CONFIG is not set" in printed
    assert printed.rstrip().endswith("nothing is wrong")


def test_devices(monkeypatch, capsys):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["doctor"]) == 0
    assert "cpu  8 (cpu)" in capsys.readouterr().out  # those of the tests


def test_json(doctor, monkeypatch, tmp_path):
    monkeypatch.setenv("KERAS_BACKEND", "")
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    code, printed = doctor(None, "--json")
    found = json.loads(printed)
    assert (code, found["ok"], found["wrong"]) == (0, True, [])
    assert found["versions"]["replicax"] == rx.__version__
    assert found["keras"]["backend"].startswith("tensorflow (KERAS_BACKEND is not set")
    assert "optax" in found["extras"]["optax"]
    assert "above the first import of keras" in found["notes"][0]
    assert len(found["cluster"]["not"]) > 3
    code, printed = doctor("{", "--json")
    assert (code, json.loads(printed)["ok"]) == (1, False)


def test_without_jax(monkeypatch, capsys):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    monkeypatch.setitem(sys.modules, "jax", None)
    monkeypatch.setitem(sys.modules, "optax", None)
    assert main(["doctor"]) == 1
    printed = capsys.readouterr().out
    assert "wrong: JAX cannot be imported" in printed
    assert "pip install jax" in printed
    assert "not installed: pip install optax" in printed


@pytest.mark.rest
def test_a_real_step_is_run(doctor, capsys):
    code, printed = doctor(None, "--test")
    assert code == 0, printed
    assert "the numbers are right" in printed
    for name in ("all-reduce", "training step"):
        assert f"  {name}" in printed
    code, printed = doctor(None, "--test", "--test-timeout", "0.1")
    assert code == 1
    assert "wrong: The test did not finish in 0.1 s." in printed


def test_waiting_and_testing_are_two_calls(doctor, capsys):
    with pytest.raises(SystemExit):
        main(["doctor", "--test", "--wait", "5"])
    assert "Set its time limit with --test-timeout" in capsys.readouterr().err


def test_the_cluster_is_a_table(doctor, free):
    first, second = free(), free()
    code, printed = doctor(config_of(first, second))
    assert code == 0  # the other may not have been started yet
    assert "TF_CONFIG is set" in printed
    assert "worker 0, which is the chief" in printed
    rows = [line.split(maxsplit=3) for line in printed.splitlines() if line.startswith("  worker ")]
    assert rows == [
        ["worker", "0", first, "this task"],
        ["worker", "1", second, "does not listen: the host is there, and no task (or doctor) runs on it"],
    ]


def test_the_transport_of_sums_is_one_line(doctor, free, monkeypatch):
    config = config_of(free(), free())
    lines = [line for line in doctor(config)[1].splitlines() if line.startswith("  sums ")]
    assert len(lines) == 1
    assert "in memory that the workers of a host share" in lines[0]

    def no_memory(*_):
        raise OSError("no memory files here")

    monkeypatch.setattr("os.memfd_create", no_memory)
    lines = [line for line in doctor(config)[1].splitlines() if line.startswith("  sums ")]
    assert len(lines) == 1
    assert (
        "over connections: this system shares no memory between processes (no memory files here)" in lines[0]
    )


def test_task_that_does_not_answer_in_time_is_reported(doctor, free):
    code, printed = doctor(config_of(free(), free()), "--wait", "0.5")
    assert code == 1
    assert "wrong: worker 1 at" in printed


@pytest.mark.rest
def test_doctors_answer_each_other(free):
    """The doctors end soon after that, no matter how long they may wait."""
    addresses = [free(), free()]
    doctors = [
        subprocess.Popen(
            [sys.executable, "-m", "replicax", "doctor", "--no-devices", "--wait", "600"],
            env={"TF_CONFIG": json.dumps(config_of(*addresses, index=n)), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    try:
        for number, process in enumerate(doctors):
            printed, _ = process.communicate(timeout=120)
            assert process.returncode == 0, printed
            assert f"{addresses[1 - number]:<24} answers" in printed
    finally:
        for process in doctors:
            process.kill()
            process.communicate()


@pytest.mark.rest
def test_a_task_that_starts_meanwhile_waits_for_the_job(free):
    """The answer of a doctor is not mistaken for the job's welcome."""
    address = free()
    process = subprocess.Popen(
        [sys.executable, "-m", "replicax", "doctor", "--no-devices", "--wait", "60"],
        env={"TF_CONFIG": json.dumps(config_of(address, free())), "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        channel = Channel(
            Membership(ClusterSpec({"worker": [address, "127.0.0.1:1"]}), Task("worker", 1)), Security()
        )
        while ask_until(address, 0, lambda to: ask_channel(to, Security())).text != "answers":
            time.sleep(0.05)
        says = [" s for worker 0, which does not answer at", "does replicax doctor run on that machine?"]
        message(ClusterStartError, lambda: channel.connect(time.monotonic() + 2), *says)
    finally:
        process.kill()
        process.wait()


def test_its_own_port_is_in_use(doctor, free):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        hang_up = threading.Thread(target=lambda: other.accept()[0].close())
        hang_up.start()
        code, printed = doctor(config_of(address, free()))
        hang_up.join(timeout=60)
    assert code == 1
    assert f"worker 0, cannot listen at its own address {address}: its port is in use" in printed


def test_another_program_is_at_an_address(doctor, free):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"

        def answer():
            connection, _ = other.accept()
            with connection:
                connection.recv(100)
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        code, printed = doctor(config_of(free(), address))
        thread.join(timeout=60)
    assert code == 1
    assert f"worker 1 at {address} is another program's" in printed


def test_servers_answer_clients_with_their_token(doctor, free, monkeypatch):
    """It answers like its own doctor, and like that of another task."""
    cluster = {"chief": [free()], "worker": [free()], "ps": [free()]}
    monkeypatch.setenv("REPLICAX_TOKEN", "theirs")
    with rx.Server(cluster, "ps", 0), rx.Server(cluster, "worker", 0) as worker:
        code, printed = doctor({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        assert code == 0
        assert (
            f"{cluster['worker'][0]:<24} answers: worker 0 runs there, and waits for a coordinator" in printed
        )
        assert f"{cluster['ps'][0]:<24} answers: ps 0 runs there" in printed
        with TaskClient(cluster["worker"][0], Credentials(token="theirs"), "worker 0") as client:
            client.ask("hello", {"incarnation": "a", "ps": cluster["ps"]}, 10.0)
        code, printed = doctor({"cluster": cluster, "task": {"type": "worker", "index": 0}})
        assert code == 0
        assert f"{cluster['worker'][0]:<24} this task, a job runs there now" in printed
        assert worker.statistics()["incarnation"] == "a"
        monkeypatch.setenv("REPLICAX_TOKEN", "another")
        code, printed = doctor({"cluster": cluster, "task": {"type": "chief", "index": 0}})
        assert code == 1
        assert f"wrong: ps 0 at {cluster['ps'][0]} runs `replicax server`, and refuses this token" in printed


def test_unknown_host(doctor, free):
    start = time.monotonic()
    code, printed = doctor(config_of(free(), "no-such-host.invalid:2222"))
    assert code == 1
    assert "no host is called 'no-such-host.invalid' here" in printed
    assert time.monotonic() - start < 60


def rows_of(printed):
    """The table of tasks: the words after each task's name and address."""
    table = printed.partition("\ntasks\n")[2].partition("\n\n")[0].splitlines()
    words = [line.split(maxsplit=3) for line in table]
    return {f"{job} {index}": text for job, index, _, text in words}


def test_own_host_is_unknown(doctor, free):
    code, printed = doctor(config_of("no-such-host.invalid:2222", free()))
    assert code == 1
    assert rows_of(printed)["worker 0"] == "this task, no host is called 'no-such-host.invalid' here"
    assert "no-such-host.invalid:2222" in printed


@pytest.mark.parametrize(
    ("kind", "part", "own"),
    [
        ("chief", "chief 0, which is the chief", "this task"),
        ("worker", "worker 0", "this task"),
        ("ps", "ps 0", "this task"),
        ("evaluator", "evaluator 0, which evaluates on its own", "this task, which needs no address"),
    ],
)
def test_every_task_sees_all_tasks(doctor, free, kind, part, own):
    cluster = {"chief": [free()], "worker": [free(), free()], "ps": [free()]}
    code, printed = doctor({"cluster": cluster, "task": {"type": kind, "index": 0}})
    assert code == 0, printed
    rows = rows_of(printed)
    assert list(rows) == ["chief 0", "worker 0", "worker 1", "ps 0"] + ["evaluator 0"] * (kind == "evaluator")
    assert [task for task, text in rows.items() if text.startswith("this task")] == [f"{kind} 0"]
    assert rows[f"{kind} 0"] == own
    assert f"  this task  {part}\n" in printed
    assert "  workers    3\n" in printed


@pytest.mark.parametrize(
    ("routes", "says"),
    [
        ("nonsense", "REPLICAX_ROUTES is not JSON"),
        (
            '{"%s": "nonsense"}',
            "'nonsense' (from REPLICAX_ROUTES) is not the address of a task: it has no port",
        ),
    ],
)
def test_malformed_routes(doctor, free, monkeypatch, routes, says):
    other = free()
    monkeypatch.setenv("REPLICAX_ROUTES", routes.replace("%s", other))
    code, printed = doctor(config_of(free(), other))
    assert code == 1
    assert f"wrong: {says}" in printed
    assert rows_of(printed) == {"worker 0": "this task", "worker 1": "was not asked"}


@pytest.mark.parametrize(
    "name", ["REPLICAX_START_TIMEOUT_S", "REPLICAX_SILENCE_TIMEOUT_S", "REPLICAX_STALL_WARNING_S"]
)
@pytest.mark.parametrize("text", ["abc", "0", "nan", "inf"])
def test_malformed_limits(doctor, monkeypatch, name, text):
    monkeypatch.setenv(name, text)
    code, printed = doctor()
    assert code == 1
    assert f"wrong: {name}='{text}' in the environment must be a number of seconds above 0" in printed


def test_collectives_by_mpi_are_wrong(doctor, free, monkeypatch):
    monkeypatch.setenv("JAX_CPU_COLLECTIVES_IMPLEMENTATION", "mpi")
    code, printed = doctor(config_of(free(), free()))
    assert code == 1
    assert "wrong: JAX_CPU_COLLECTIVES_IMPLEMENTATION is mpi" in printed


@pytest.mark.parametrize("text", ["nan", "-1", "soon"])
def test_wait_is_a_number_of_seconds(doctor, capsys, text):
    with pytest.raises(SystemExit):
        doctor(None, f"--wait={text}")
    assert f"'{text}' is not a number of seconds of at least 0" in capsys.readouterr().err


def test_unknown_addresses_are_not_reported(doctor, free, monkeypatch):
    """For torchrun, only the first worker's host is known."""
    host, port = free().split(":")
    monkeypatch.setenv("REPLICAX_PORT", port)
    for name, value in {"RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": host, "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, printed = doctor(None, "--wait", "0.5")
    assert code == 0, printed
    rows = rows_of(printed)
    assert rows.pop("worker 0") == "this task"
    assert list(rows) == ["worker 1", "worker 2"]
    assert all(text.startswith("cannot be checked from here") for text in rows.values())


def test_a_train_job(doctor, free, monkeypatch):
    """Kubeflow's runtime jax-distributed sets these three, and no TF_CONFIG."""
    for name, value in {"PROCESS_ID": "0", "NUM_PROCESSES": "2", "COORDINATOR_ADDRESS": free()}.items():
        monkeypatch.setenv(f"JAX_{name}", value)
    code, printed = doctor(None)
    assert code == 0, printed
    assert "JAX (JaxClusterResolver)" in printed
    assert "a TrainJob's JAX_PROCESS_ID=0 and JAX_NUM_PROCESSES=2 are set." in printed
    assert list(rows_of(printed)) == ["worker 0", "worker 1"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "TF_CONFIG is not JSON"),
        (config_of("a:1", "b:1", index=2), "The `task_id` 2 exceeds the maximum id of worker"),
        (config_of("a:1", "a:1"), "occurs 2 times in the cluster"),
    ],
)
def test_a_malformed_tf_config(doctor, config, says):
    code, printed = doctor(config)
    assert code == 1
    assert "wrong: " in printed
    assert says in printed


def test_job_that_tolerates_failures_answers_with_its_epoch(monkeypatch):
    answered = {"kind": "pong", "cluster": "worker 0, worker 1", "is_ending": False}
    for epoch, text in (
        (3, "answers: a job runs there, whose workers are in epoch 3"),
        (None, "answers: a job runs there"),
    ):
        monkeypatch.setattr(answers, "ask", lambda *arguments, epoch=epoch: {**answered, "epoch": epoch})
        assert ask_channel("127.0.0.1:1", Security()).text == text

"""``replicax doctor``: what it prints for clusters that are well, and for those that are not."""

import json
import socket
import subprocess
import sys
import threading
import time

import pytest

from checks import message
from replicax.__main__ import main
from replicax._src.cli.doctor import _ask
from replicax._src.cluster.channel import Channel
from replicax.errors import ClusterStartError

pytestmark = pytest.mark.timeout(60)
LAUNCHERS = [
    "TF_CONFIG",
    "RANK",
    "WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "SLURM_STEP_NUM_TASKS",
    "SM_HOSTS",
]


@pytest.fixture
def doctor(monkeypatch, capsys):
    """``doctor(config, *options)``: the exit code and what it printed, with that TF_CONFIG."""
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
    """An address at which nobody listens."""

    def address():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return f"127.0.0.1:{probe.getsockname()[1]}"

    return address


def test_a_worker_on_its_own(doctor):
    code, printed = doctor()
    assert code == 0
    assert "Nothing in the environment describes a cluster" in printed
    assert "TF_CONFIG is not set" in printed
    assert printed.rstrip().endswith("nothing is wrong")


def test_devices(monkeypatch, capsys):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    assert main(["doctor"]) == 0
    assert "cpu  8 (cpu)" in capsys.readouterr().out  # those of the tests


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


def test_who_does_not_answer_in_time_is_wrong(doctor, free):
    code, printed = doctor(config_of(free(), free()), "--wait", "0.5")
    assert code == 1
    assert "wrong: worker 1 at" in printed


def test_doctors_answer_each_other(free):
    addresses = [free(), free()]
    doctors = [
        subprocess.Popen(
            [sys.executable, "-m", "replicax", "doctor", "--no-devices", "--wait", "8"],
            env={"TF_CONFIG": json.dumps(config_of(*addresses, index=n)), "PYTHONPATH": ":".join(sys.path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for n in range(2)
    ]
    for number, process in enumerate(doctors):
        printed, _ = process.communicate(timeout=40)
        assert process.returncode == 0, printed
        assert f"{addresses[1 - number]:<24} answers" in printed


def test_a_task_that_starts_meanwhile_waits_for_the_job(free):
    """What the doctor answers is not taken for the job's welcome."""
    address = free()
    process = subprocess.Popen(
        [sys.executable, "-m", "replicax", "doctor", "--no-devices", "--wait", "8"],
        env={"TF_CONFIG": json.dumps(config_of(address, free())), "PYTHONPATH": ":".join(sys.path)},
        stdout=subprocess.DEVNULL,
    )
    try:
        channel = Channel(address, 1, ["worker 0", "worker 1"], "print")
        while _ask(address, 0).text != "answers":
            time.sleep(0.05)
        says = ["worker 1 waited 1 s for worker 0", "does replicax doctor run on that machine?"]
        message(ClusterStartError, lambda: channel.connect(time.monotonic() + 0.8), *says)
    finally:
        process.kill()
        process.wait()


def test_its_own_port_is_in_use(doctor, free):
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        hang_up = threading.Thread(target=lambda: other.accept()[0].close())
        hang_up.start()
        code, printed = doctor(config_of(address, free()))
        hang_up.join(timeout=5)
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
        thread.join(timeout=5)
    assert code == 1
    assert f"worker 1 at {address} is another program's" in printed


def test_a_host_that_nobody_knows(doctor, free):
    start = time.monotonic()
    code, printed = doctor(config_of(free(), "no-such-host.invalid:2222"))
    assert code == 1
    assert "no host is called 'no-such-host.invalid' here" in printed
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ("{", "TF_CONFIG is not JSON"),
        (config_of("a:1", "b:1", index=2), "The `task_id` 2 exceeds the maximum id of worker"),
        (config_of("a:1", "a:1"), "stands 2 times in the cluster"),
    ],
)
def test_a_malformed_tf_config(doctor, config, says):
    code, printed = doctor(config)
    assert code == 1
    assert "wrong: " in printed
    assert says in printed

"""``replicax server``, and ``replicax launch`` with parameter servers."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import replicax
from replicax.__main__ import main
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.machine_layout import free_ports

LIMIT_S = 120
pytestmark = pytest.mark.timeout(250)
CLUSTER = '{"worker": ["h:1", "h:2"], "ps": ["h:3"]}'

# The launcher without JAX, as in test_launch.py. A server may be another program: of one line, to be fast.
LAUNCHER = f"""
import os, sys, types
sys.modules["replicax"] = package = types.ModuleType("replicax")
package.__path__ = {replicax.__path__!r}
import replicax._launch.tasks_here as tasks_here
from replicax.__main__ import main
if "SERVER" in os.environ:
    tasks_here.SERVER_COMMAND = ("-c", os.environ["SERVER"])
sys.exit(main())
"""
TASK = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]["type"] + " " + str(config["task"]["index"])
restart = int(os.environ["REPLICAX_RESTART_COUNT"])
token = os.environ.get("REPLICAX_TOKEN", "")
"""


@pytest.fixture
def launch(tmp_path):
    """``launch(script, *options, server=, **environment)``: runs the launcher to its end, and returns its output."""

    def run(script, *options, server=None, **environment):
        path = tmp_path / "train.py"
        path.write_text(TASK + textwrap.dedent(script))
        told = {} if server is None else {"SERVER": TASK + textwrap.dedent(server)}
        dropped = ("JAX_", "PJRT_", "TF_CONFIG", "REPLICAX_")
        clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        return subprocess.run(
            [sys.executable, "-c", LAUNCHER, "launch", *map(str, options), str(path), str(tmp_path)],
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
            check=False,
            env={**clean, **told, **environment},
        )

    return run


# --- which task ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which task? Set TF_CONFIG, or give --cluster, --job and --index"),
        (["--cluster", CLUSTER, "--job", "ps"], "which task?"),
        (["--cluster", "h:1,h:2", "--job", "ps", "--index", "0"], "is not JSON"),
        (["--cluster", '["h:1"]', "--job", "ps", "--index", "0"], "must be a dictionary"),
    ],
)
def test_server_must_know_its_task(monkeypatch, capsys, arguments, says):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    with pytest.raises(SystemExit) as ended:
        main(["server", *arguments])
    assert ended.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("task", "more", "says"),
    [
        ({"type": "chief", "index": 0}, [], "'worker' or 'ps', got job_name='chief'"),
        ({"type": "ps", "index": 1}, [], "exceeds the maximum id of ps"),
        ({"type": "ps", "index": 0}, ["--silence-timeout", "0"], "silence_timeout_s must be a number"),
        ({"type": "ps", "index": 0}, [], "would accept everybody"),
    ],
)
def test_invalid_servers_do_not_start(monkeypatch, capsys, task, more, says):
    config = {"cluster": {"chief": ["h:0"], **json.loads(CLUSTER)}, "task": task}
    monkeypatch.setenv("TF_CONFIG", json.dumps(config))
    monkeypatch.delenv("REPLICAX_TOKEN", raising=False)
    assert main(["server", *more]) == 1
    assert says in capsys.readouterr().err


def test_one_by_hand():
    """The options replace TF_CONFIG, or a part of it; Ctrl-C ends the server, even with an open stream."""
    port = free_ports(1)[0]
    cluster = {"worker": ["127.0.0.1:1", f"127.0.0.1:{port}"], "ps": ["127.0.0.1:2"]}
    environment = {**os.environ, "REPLICAX_TOKEN": "a secret", "REPLICAX_CACHE_DIR": "off"}
    command = [
        "server",
        "--cluster",
        json.dumps(cluster),
        "--job",
        "worker",
        "--index",
        "1",
        "--devices",
        "2",
    ]
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-m", "replicax", *command],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        assert process.stdout.readline() == f"worker 1 listens at 127.0.0.1:{port}\n"
        with TaskClient(f"127.0.0.1:{port}", Credentials(token="a secret"), "worker 1") as client:
            assert client.ask("status", {}, 60.0)["num_devices"] == 2
            with client.open():
                process.send_signal(signal.SIGINT)
                assert process.communicate(timeout=LIMIT_S)[0] == ""
        assert process.returncode == 130
    finally:
        process.kill()
        process.communicate()


# --- launch: who runs what ----------------------------------------------------------------------------

SAYS_WHO = """
print(sys.argv[0] != "-c" and "script" or "server", len(token), flush=True)
open(os.path.join(os.environ["THERE"], task), "w").close()
"""
SERVER = SAYS_WHO + "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(60)\n"
SCRIPT = SAYS_WHO + "while set(NAMES) - set(os.listdir(sys.argv[1])): time.sleep(0.01)\n"


def who_ran_what(result):
    lines = [line.partition(" | ") for line in result.stdout.splitlines()]
    return {name.strip(): text for name, _, text in lines}


@pytest.mark.parametrize(
    ("options", "scripts"),
    [
        ([], {"chief 0"}),
        pytest.param(["--evaluator"], {"chief 0", "evaluator 0"}, marks=pytest.mark.long),
        (["--script-in", "workers"], {"chief 0", "worker 0", "worker 1"}),
        pytest.param(["--no-chief"], {"worker 0", "worker 1"}, marks=pytest.mark.long),
        pytest.param(
            ["--script-in", "all"], {"chief 0", "worker 0", "worker 1", "ps 0"}, marks=pytest.mark.long
        ),
    ],
    ids=["chief", "evaluator", "workers", "no chief", "all"],
)
def test_script_in_chooses_the_tasks_that_run_the_script(launch, tmp_path, options, scripts):
    tasks = {"worker 0", "worker 1", "ps 0"} | scripts
    script = SCRIPT.replace("NAMES", repr(tasks))
    if "all" in options:  # the end of the chief is that of the whole, as if the others were in Server.join
        script += "if 'chief' not in task: time.sleep(60)\n"
    result = launch(script, "--workers", 2, "--ps", 1, *options, server=SERVER, THERE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    ran = who_ran_what(result)
    assert set(ran) == tasks
    for task, text in ran.items():
        assert text == f"{'script' if task in scripts else 'server'} 43", task


def test_without_parameter_servers_all_run_the_script_and_share_a_token(launch):
    result = launch("print('script', len(token))", "--workers", 2)
    assert who_ran_what(result) == {"worker 0": "script 43", "worker 1": "script 43"}


def test_users_token_is_kept(launch, tmp_path):
    result = launch(
        "print(token)", "--ps", 1, server="time.sleep(60)", REPLICAX_TOKEN="mine", THERE=str(tmp_path)
    )
    assert "chief 0  | mine" in result.stdout


def test_script_needs_a_task_to_run_it(launch):
    result = launch("", "--ps", 1, "--no-chief", "--script-in", "chief", server="")
    assert result.returncode == 2
    assert "cannot run in the chief: there is none" in result.stderr


# --- launch: failures ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_restarts", "code"), [(2, 0), (1, 7)])
def test_dead_worker_is_restarted_automatically(launch, tmp_path, num_restarts, code):
    server = """
    print("started", restart, flush=True)
    if task == "worker 1" and restart < 2:
        while {"worker 0", "ps 0"} - set(os.listdir(os.environ["THERE"])):
            time.sleep(0.01)
        sys.exit(7)
    open(os.path.join(os.environ["THERE"], task), "w").close()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
    """
    script = """
    while "worker 1" not in os.listdir(sys.argv[1]):
        time.sleep(0.01)
    """
    options = ["--workers", 2, "--ps", 1, "--server-restarts", num_restarts, "--grace", 0.2]
    result = launch(script, *options, server=server, THERE=str(tmp_path))
    assert result.returncode == code, result.stderr
    assert f"worker 1 exited with code 7. Starting it again: restart 1 of {num_restarts}." in result.stderr
    started = [line for line in result.stdout.splitlines() if "started" in line]
    own = [line for line in started if "worker 1" in line]
    assert own == [f"worker 1 | started {n}" for n in range(num_restarts + 1)]
    assert len(started) == len(own) + 2  # the others once
    assert ("worker 1 exited with code 7, the first to fail" in result.stderr) == bool(code)


def test_dead_parameter_server_ends_the_job(launch):
    script = "signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))\ntime.sleep(60)"
    server = "sys.exit(7) if task == 'ps 0' else time.sleep(60)"
    result = launch(script, "--ps", 1, "--grace", 0.2, server=server)
    assert result.returncode == 7
    assert "ps 0 exited with code 7. Waiting up to 0.2 s for chief 0 to end." in result.stderr


def test_a_parameter_server_with_snapshots_is_started_again(launch, tmp_path):
    server = """
    if task == "ps 0" and not restart:
        sys.exit(7)
    print(task, sys.argv[1:])
    open(os.path.join(os.environ["THERE"], task), "w").close()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    time.sleep(60)
    """
    script = "while {'ps 0', 'worker 0'} - set(os.listdir(sys.argv[1])): time.sleep(0.01)"
    result = launch(script, "--ps", 1, "--snapshot-dir", "kept", server=server, THERE=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert "ps 0 exited with code 7. Starting it again: restart 1 of 3." in result.stderr
    assert "ps 0     | ps 0 ['--snapshot-dir', 'kept']" in result.stdout
    assert "worker 0 | worker 0 []" in result.stdout


def test_servers_are_not_waited_for_when_the_script_fails(launch, tmp_path):
    script = "while len(os.listdir(sys.argv[1])) < 3: time.sleep(0.01)\nsys.exit(5)"
    result = launch(script, "--ps", 1, "--grace", 50, server=SERVER, THERE=str(tmp_path))
    assert result.returncode == 5
    assert "Waiting up to" not in result.stderr


# --- all of it ----------------------------------------------------------------------------------------


@pytest.mark.rest
def test_complete_cluster(launch):
    """Real servers. The script is the coordinator, and kills the worker; another process replaces it."""
    script = """
    import pathlib
    from replicax._src.cluster.credentials import Credentials
    from replicax._src.vocabulary.errors import UnavailableError
    from replicax._ps.transport.transport import TaskClient

    def ask(job, what):
        header = {"incarnation": "a", "ps": config["cluster"]["ps"]}
        for _ in range(600):
            try:
                with TaskClient(config["cluster"][job][0], Credentials.from_environment(os.environ), job) as client:
                    return client.ask(what, header, 5.0)
            except UnavailableError:
                time.sleep(0.05)

    first, ps = ask("worker", "hello"), ask("ps", "hello")
    for pid in (first["pid"], ps["pid"], os.getpid()):
        assert token and token not in pathlib.Path(f"/proc/{pid}/cmdline").read_text()
    os.kill(first["pid"], signal.SIGKILL)
    second = ask("worker", "status")
    assert second["instance"] != first["instance"], "the same worker"
    assert second["incarnation"] is None, "it knows the coordinator"
    print("pids", first["pid"], second["pid"], ps["pid"])
    """
    result = launch(script, "--workers", 1, "--ps", 1)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "worker 0 was killed by SIGKILL. Starting it again: restart 1 of 3." in result.stderr
    pids = re.search(r"chief 0  \| pids (\d+) (\d+) (\d+)", result.stdout).groups()
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]
    # The second worker may be ended when it has answered, but has not yet printed its address.
    assert len([line for line in result.stdout.splitlines() if " listens at 127.0.0.1:" in line]) in (2, 3)

"""``replicax launch``: its output and exit codes, and that it leaves no process. The scripts are a few lines."""

import contextlib
import gc
import json
import os
import pty
import re
import select
import shlex
import signal
import socket
import subprocess
import sys
import textwrap
import time
import weakref
from pathlib import Path

import pytest

import replicax
from checks import is_there
from replicax._launch import supervisor
from replicax._launch.display import Display
from replicax._launch.supervisor import Start, Supervisor, SupervisorOptions
from replicax._src.cluster.processes import Process
from replicax._src.cluster.spec import Task

LIMIT_S = 100
pytestmark = pytest.mark.timeout(250)

# The launcher without the imports of replicax/__init__.py: JAX takes a second. So it needs none of them.
LAUNCHER = f"""
import sys, types
sys.modules["replicax"] = package = types.ModuleType("replicax")
package.__path__ = {replicax.__path__!r}
from replicax.__main__ import main
code = main()
assert not {{"jax", "numpy"}} & set(sys.modules)
sys.exit(code)
"""
START = [sys.executable, "-c", LAUNCHER, "launch"]

# What scripts begin with.
TASK = """
import json, os, signal, sys, time
config = json.loads(os.environ["TF_CONFIG"])
task = config["task"]["type"] + " " + str(config["task"]["index"])
restart = int(os.environ["REPLICAX_RESTART_COUNT"])

def tell(path):
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)

def wait_for_the_end(path):
    # The process whose number is in the file may take longer to end than this one.
    while not os.path.exists(path):
        time.sleep(0.01)
    try:
        while open(f"/proc/{open(path).read()}/stat").read().rpartition(")")[2].split()[0] not in "ZX":
            time.sleep(0.01)
    except OSError:
        pass
"""


@pytest.fixture
def script(tmp_path):
    def write(source):
        path = tmp_path / "script.py"
        path.write_text(TASK + textwrap.dedent(source))
        return str(path)

    return write


def clean_environment(**more):
    environment = {
        k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PJRT_", "TF_CONFIG", "NO_COLOR"))
    }
    return {**environment, "TERM": "xterm", **more}


def launch(*arguments, stderr=subprocess.PIPE, **environment):
    return subprocess.run(
        [*START, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=clean_environment(**environment),
    )


@contextlib.contextmanager
def launched(*arguments):
    """A running launcher, which is gone afterwards."""
    process = subprocess.Popen(
        [*START, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=clean_environment(),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


# --- tasks --------------------------------------------------------------------------------------------


def test_lines_have_the_name_of_their_task_and_arguments_are_passed_on(script):
    path = script("print(sys.argv[1:]); print('to stderr', file=sys.stderr)")
    result = launch("--workers", 2, "--evaluator", path, "--workers", "7", "-m", "--", "x")
    assert result.returncode == 0
    arguments = "['--workers', '7', '-m', '--', 'x']"
    assert sorted(result.stdout.splitlines()) == sorted(
        f"{task:11} | {line}"
        for task in ("worker 0", "worker 1", "evaluator 0")
        for line in (arguments, "to stderr")
    )


def test_each_task_gets_its_configuration(script, tmp_path):
    path = script("""
    print(json.dumps([config, task, restart, sorted(k for k in os.environ if k.startswith(("JAX_", "PJRT_")))]))
    open(os.path.join(sys.argv[1], task), "w").close()
    while "chief" not in task or len(os.listdir(sys.argv[1])) < 4:
        time.sleep(0.01)
    """)
    (tmp_path / "there").mkdir()
    more = ["--devices-per-worker", 2, "--script-in", "all"]
    result = launch("--workers", 2, "--ps", 1, *more, path, tmp_path / "there")
    assert result.returncode == 0, result.stderr
    told = {
        line.partition("|")[0].strip(): json.loads(line.partition("|")[2])
        for line in result.stdout.splitlines()
    }
    assert set(told) == {"chief 0", "worker 0", "worker 1", "ps 0"}
    clusters = [config["cluster"] for config, *_ in told.values()]
    assert all(cluster == clusters[0] for cluster in clusters)
    assert {job: len(addresses) for job, addresses in clusters[0].items()} == {
        "chief": 1,
        "worker": 2,
        "ps": 1,
    }
    addresses = [address for job in clusters[0].values() for address in job]
    assert len(set(addresses)) == 4
    for name, (_, task, restart, variables) in told.items():
        assert name == task
        assert restart == 0
        assert variables == ([] if name == "ps 0" else ["JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS", "PJRT_NPROC"])


def test_a_module(tmp_path):
    (tmp_path / "some_module.py").write_text("import sys; print(__name__, sys.argv[1:])")
    result = launch("-m", "some_module", "--lr", "0.1", PYTHONPATH=str(tmp_path))
    assert result.returncode == 0, result.stderr
    assert result.stdout == "worker 0 | __main__ ['--lr', '0.1']\n"


@pytest.mark.rest
def test_the_evaluator_is_waited_for_and_ended(script, tmp_path):
    path = script("""
    if "evaluator" in task:
        time.sleep(0.3)
        print("evaluated", flush=True)
        if sys.argv[1] == "forever":
            open(sys.argv[2], "w").close()
            time.sleep(60)
    elif sys.argv[1] == "forever":
        while not os.path.exists(sys.argv[2]):
            time.sleep(0.01)
    """)
    result = launch("--evaluator", path, "once")
    assert result.returncode == 0
    assert "evaluator 0 | evaluated" in result.stdout
    began = time.monotonic()
    result = launch("--evaluator", "--evaluator-timeout", 1, path, "forever", tmp_path / "evaluated")
    assert result.returncode == 0
    assert "evaluator 0 | evaluated" in result.stdout
    assert "waiting up to 1 s for the evaluator" in result.stderr
    assert time.monotonic() - began < LIMIT_S


@pytest.mark.parametrize("when", ["while the others train", "after the training"])
def test_an_evaluator_that_fails_is_reported(script, when):
    path = script("""
    if "evaluator" in task:
        time.sleep(0.2)
        print("no such weights")
        sys.exit(3)
    if sys.argv[1] == "while the others train":
        time.sleep(60)
    """)
    result = launch("--workers", 2, "--evaluator", "--grace", 0.1, path, when)
    assert result.returncode == 3
    assert (
        "evaluator 0 exited with code 3, the first to fail. Its last lines:\n    no such weights"
        in result.stderr
    )


# --- failures -----------------------------------------------------------------------------------------


def test_the_first_failure_is_the_exit_code_and_its_last_lines_are_repeated(script, tmp_path):
    path = script("""
    if task == "worker 1":
        for i in range(100):
            print("line", i)
        tell(sys.argv[1])
        sys.exit(7)
    wait_for_the_end(sys.argv[1])
    while "Waiting up to" not in open(sys.argv[2]).read():
        time.sleep(0.01)
    print("the others are gone")
    sys.exit(8)  # by itself, and later
    """)
    with (tmp_path / "notes").open("w") as notes:
        result = launch("--workers", 3, "--grace", LIMIT_S, path, tmp_path / "ends", notes.name, stderr=notes)
    shown = (tmp_path / "notes").read_text()
    assert result.returncode == 7
    assert "worker 0 | the others are gone" in result.stdout
    assert f"worker 1 exited with code 7. Waiting up to {LIMIT_S} s for worker 0, worker 2 to end." in shown
    last = shown.partition("worker 1 exited with code 7, the first to fail. Its last lines:\n")[2]
    assert last.splitlines() == [f"    line {i}" for i in range(80, 100)]


def test_the_first_of_several_failures_counts_also_if_the_launcher_was_asleep(script, tmp_path):
    path = script("""
    print("ready", os.getpid())
    while not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    if task == "worker 1":
        tell(sys.argv[2])
        sys.exit(7)
    wait_for_the_end(sys.argv[2])
    time.sleep(0.8)  # its guard has noted the time by then
    sys.exit(8)
    """)
    with launched("--workers", 3, path, tmp_path / "go", tmp_path / "ends") as launcher:
        pids = [int(launcher.stdout.readline().partition("ready")[2]) for _ in range(3)]
        launcher.send_signal(signal.SIGSTOP)
        (tmp_path / "go").touch()
        until(lambda: not any(map(is_there, pids)), "the ends of all tasks")
        launcher.send_signal(signal.SIGCONT)
        rest = launcher.communicate(timeout=LIMIT_S)[0]
        assert launcher.returncode == 7
    assert "worker 1 exited with code 7, the first to fail" in rest


@pytest.mark.rest
def test_first_task_to_start_ending_is_the_first_failure(script, tmp_path):
    """Like worker 0 of a cluster: it waits for the others, which end because it has failed."""
    path = script("""
    if task == "worker 1":
        while not os.path.exists(sys.argv[1]):
            time.sleep(0.01)
        sys.exit(1)
    status = {"step": 3, "time": time.time(), "state": "ending", "left_at": time.monotonic()}
    with open(os.environ["REPLICAX_STATUS_FILE"], "w") as file:
        json.dump(status, file)
    print("my own mistake")
    open(sys.argv[1], "w").close()
    time.sleep(1)
    sys.exit(7)
    """)
    result = launch("--workers", 2, path, tmp_path / "ends")
    assert result.returncode == 7
    assert (
        "worker 0 exited with code 7, the first to fail. Its last lines:\n    my own mistake" in result.stderr
    )


def test_a_task_that_is_killed(script):
    result = launch(
        "--workers",
        2,
        "--grace",
        0.1,
        script("""
    if task == "worker 0":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)
    """),
    )
    assert result.returncode == 137
    assert "worker 0 was killed by SIGKILL, the first to fail" in result.stderr
    assert "(it has written nothing)" in result.stderr


@pytest.mark.rest
def test_task_that_does_not_end_is_terminated_and_then_killed(script, tmp_path):
    (tmp_path / "ready").mkdir()
    result = launch(
        "--workers",
        3,
        "--grace",
        2,
        script("""
    def end(number, frame):
        print("asked to end")
        if task == "worker 1":
            sys.exit(0)
    signal.signal(signal.SIGTERM, end)
    open(os.path.join(sys.argv[1], task), "w").close()
    if task == "worker 0":
        while len(os.listdir(sys.argv[1])) < 3:
            time.sleep(0.01)
        sys.exit(1)
    while True:
        time.sleep(60)
    """),
        tmp_path / "ready",
    )
    assert result.returncode == 1
    assert "worker 1 | asked to end" in result.stdout
    assert "worker 2 | asked to end" in result.stdout
    assert "worker 2 did not end, and will be killed" in result.stderr
    assert "worker 1 did not" not in result.stderr


@pytest.mark.parametrize(
    ("num_restarts", "code"), [(1, 5), (2, 0), pytest.param(9, 0, marks=pytest.mark.long)]
)
def test_restarts(script, num_restarts, code):
    path = script("""
    print(restart, config["cluster"]["worker"])
    if task == "worker 1" and restart < 2:
        sys.exit(5)
    if restart < 2:
        time.sleep(60)
    """)
    result = launch("--workers", 2, "--grace", 0, "--max-restarts", num_restarts, path)
    assert result.returncode == code
    lines = [
        line.partition("| ")[2].split(maxsplit=1) for line in result.stdout.splitlines() if "worker 1" in line
    ]
    assert [count for count, _ in lines] == ["0", "1", "2"][: num_restarts + 1]
    assert len({ports for _, ports in lines}) == 1
    assert f"restart 1 of {num_restarts}" in result.stderr


def test_curves_of_the_status_are_found_again_after_a_restart(script, tmp_path):
    """Its own file is gone afterwards, and one that the user has chosen stays."""
    path = script("""
    with open(os.environ["REPLICAX_STATUS_HISTORY"], "a+") as file:
        file.write(str(restart))
        file.seek(0)
        print("history", file.read(), os.environ["REPLICAX_STATUS_HISTORY"])
    time.sleep(float(sys.argv[1]))  # until the launcher has seen it
    sys.exit(5 * (restart == 0))
    """)
    own = tmp_path / "history.json"
    for chosen, s in ({}, 1.2), ({"REPLICAX_STATUS_HISTORY": str(own)}, 0.0):
        result = launch("--workers", 1, "--grace", 0, "--max-restarts", 1, path, s, **chosen)
        told = re.findall(r"history (\d+) (\S+)", result.stdout)
        assert [starts for starts, _ in told] == ["0", "01"], result.stderr
        assert [os.path.exists(file) for _, file in told] == [bool(chosen)] * 2
    assert own.read_text() == "01"


def test_restart_leaves_ports_that_another_program_has_taken(script, tmp_path):
    path = script("""
    print("ports", *[address.rpartition(":")[2] for address in config["cluster"]["worker"]], flush=True)
    while not restart and not os.path.exists(sys.argv[1]):
        time.sleep(0.01)
    sys.exit(5 * (not restart))
    """)
    options = ["--workers", 2, "--grace", 0, "--max-restarts", 1, "--status", path, tmp_path / "go"]
    with launched(*options) as launcher, contextlib.ExitStack() as taken:
        address = re.match(r"Status: http://(.*)/ and", launcher.stdout.readline())[1]
        ports = launcher.stdout.readline().partition("ports")[2].split()
        for port in (ports[0], address.rpartition(":")[2]):
            taken.enter_context(socket.create_server(("127.0.0.1", int(port))))
        (tmp_path / "go").touch()
        rest = launcher.communicate(timeout=LIMIT_S)[0]
        assert launcher.returncode == 0, rest
    starts = re.findall(r"worker 0 \| ports (\d+) (\d+)", rest)
    assert starts[-1][1] == ports[1]
    assert starts[-1][0] not in ports
    (new_address,) = re.findall(r"Status: http://(.*)/ and", rest)
    assert new_address != address


@pytest.mark.rest
def test_exit_code_42_restarts_without_being_counted(script, tmp_path):
    folder = tmp_path / "checkpoints"
    path = script("""
    print("saves in", os.environ["REPLICAX_CHECKPOINT_DIR"])
    folder = os.environ["REPLICAX_CHECKPOINT_DIR"]
    if task == "worker 0":
        os.makedirs(f"{folder}/ckpt-{restart}")
        with open(f"{folder}/ckpt-{restart}/manifest.json", "w") as file:
            json.dump({"contents": {"number": restart}}, file)
    if restart < 3:
        sys.exit(42)
    """)
    result = launch("--workers", 2, "--checkpoint-dir", folder, path)
    assert result.returncode == 0, result.stderr
    assert result.stdout.count(f"worker 1 | saves in {folder}") == 4
    assert result.stderr.count("exited with code 42: it was preempted, and has saved.") == 3
    assert result.stderr.count("Starting all tasks again; this restart is not counted.") == 3
    assert "the first to fail" not in result.stderr


@pytest.mark.parametrize("code", [3, 42])
def test_restarts_of_a_script_that_only_writes_other_files_are_bounded_and_wait(script, tmp_path, code):
    path = script("""
    folder = os.environ["REPLICAX_CHECKPOINT_DIR"]
    os.makedirs(folder, exist_ok=True)
    open(f"{folder}/events.out.tfevents.{time.time_ns()}.vm", "w").close()
    print("runs")
    sys.exit(int(sys.argv[1]))
    """)
    began = time.monotonic()
    result = launch("--max-restarts", 2, "--checkpoint-dir", tmp_path / "saved", path, code)
    assert result.returncode == code
    assert result.stdout.count("runs") == 3
    assert time.monotonic() - began > 3  # 1 s and 2 s
    assert "Starting all tasks again: restart 2 of 2. It waits 2 s." in result.stderr


def test_terminated_server_restarts_without_being_counted(tmp_path, capfd, monkeypatch):
    """It keeps no state that could be lost, so its machine may be taken away any number of times. Each end is noticed
    at once."""
    monkeypatch.setattr(supervisor, "_TICK_S", 1000.0)
    made = []

    class Counted(Process):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            made.append(weakref.ref(self))
            until(lambda: self.num_kept() <= 3, "processes that have ended are given back")

        @staticmethod
        def num_kept():
            """That of the chief, this one, and one of those before for a moment; their threads end later."""
            gc.collect()
            return sum(process() is not None for process in made)

    monkeypatch.setattr(supervisor, "Process", Counted)
    server = tmp_path / "server.py"
    server.write_text(
        f"import os, pathlib, time\npath = pathlib.Path({str(tmp_path)!r}, str(os.getpid()))\n"
        "path.touch()\ntime.sleep(60)"
    )
    training = tmp_path / "training.py"
    training.write_text(f"""
import os, pathlib, signal, time
for number in range(6):
    while not (new := [path for path in pathlib.Path({str(tmp_path)!r}).glob("[0-9]*")]):
        time.sleep(0.01)
    new[0].unlink()
    os.kill(int(new[0].name), signal.SIGTERM)
""")
    display = Display([Task("chief", 0), Task("worker", 0)], sys.stdout, sys.stderr, {}, is_plain=True)
    starts = [
        Start(Task("chief", 0), [sys.executable, str(training)], dict(os.environ)),
        Start(Task("worker", 0), [sys.executable, str(server)], dict(os.environ), False, True, 1),
    ]
    try:
        assert Supervisor(starts, display, SupervisorOptions()).run() == 0
    finally:
        display.close()
    told = capfd.readouterr().err
    assert told.count("worker 0 was told to end. Starting it again; this is not counted.") >= 5
    assert len(made) >= 7


def test_closed_output_ends_the_launcher(script):
    path = script("while True: print('x', flush=True); time.sleep(0.01)")
    with launched("--workers", 2, "--grace", 1, path) as launcher:
        assert re.fullmatch(r"worker . \| x\n", launcher.stdout.readline())
        launcher.stdout.close()
        assert launcher.wait(LIMIT_S) == 141


@pytest.mark.parametrize("is_noticed_first", [False, True])
def test_closed_terminal_leaves_the_tasks_their_time_to_save(script, tmp_path, is_noticed_first):
    """SIGHUP comes with it, and lines can no longer be shown. Together they are one reason to end, not two."""
    path = script("""
    def save(number, frame):
        os.write(1, b"saving\\n")
        open(sys.argv[1] + ".told", "w").close()
        time.sleep(1)
        open(sys.argv[1], "w").close()
        os._exit(0)
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(0.01)
        if sys.argv[2] == "True":
            os.write(1, b"a line\\n")
    """)
    with launched("--grace", 60, path, tmp_path / "saved", is_noticed_first) as launcher:
        assert "ready" in launcher.stdout.readline()
        launcher.stdout.close()
        if is_noticed_first:
            until((tmp_path / "saved.told").exists, "the closed pipe is noticed")
        launcher.send_signal(signal.SIGHUP)
        assert launcher.wait(LIMIT_S) == 129
    assert (tmp_path / "saved").exists()


# --- its own end --------------------------------------------------------------------------------------

FOREVER = """
import subprocess
child = subprocess.Popen(["sleep", "60"])
def end(number, frame):
    print("asked to end", flush=True)
    if sys.argv[1] == "obeys":
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
print("pids", os.getpid(), child.pid)
while True:
    time.sleep(60)
"""


def started_pids(process, num_tasks):
    pids = []
    while len(pids) < 2 * num_tasks:
        line = process.stdout.readline()
        assert line, "the launcher has ended"
        pids += map(int, line.partition("pids")[2].split())
    return pids


@pytest.mark.parametrize(
    ("number", "code"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)],
    ids=["INT", "TERM", "HUP"],
)
def test_signals_are_passed_on(script, number, code):
    with launched("--workers", 2, script(FOREVER), "obeys") as launcher:
        pids = started_pids(launcher, 2)
        launcher.send_signal(number)
        rest = launcher.communicate(timeout=LIMIT_S)[0]
        assert launcher.returncode == code
    assert not any(map(is_there, pids))
    assert f"{number.name}: ending worker 0, worker 1." in rest
    assert "worker 0 | asked to end" in rest
    assert "worker 1 | asked to end" in rest
    assert "first to fail" not in rest


def test_task_is_killed_after_the_grace_period_or_a_second_signal(script):
    with launched("--grace", 0.3, script(FOREVER), "no") as launcher:
        pids = started_pids(launcher, 1)
        launcher.send_signal(signal.SIGTERM)
        assert "worker 0 did not end, and will be killed" in launcher.communicate(timeout=LIMIT_S)[0]
        assert launcher.returncode == 143
    assert not any(map(is_there, pids))
    with launched("--grace", 1000, script(FOREVER), "no") as launcher:
        pids = started_pids(launcher, 1)
        launcher.send_signal(signal.SIGINT)
        until(lambda: "asked to end" in launcher.stdout.readline(), "the first signal to arrive")
        launcher.send_signal(signal.SIGINT)
        assert launcher.wait(LIMIT_S) == 130
    assert not any(map(is_there, pids))


def test_killed_launcher_leaves_no_process(script, tmp_path, monkeypatch):
    files = tmp_path / "files"
    files.mkdir()
    monkeypatch.setenv("TMPDIR", str(files))
    with launched("--workers", 3, script(FOREVER), "no") as launcher:
        pids = started_pids(launcher, 3)
        assert all(map(is_there, pids))
        assert len(list(files.iterdir())) == 3
        launcher.kill()
        until(lambda: not any(map(is_there, pids)), "everything gone")
        until(lambda: not list(files.iterdir()), "its files gone")


def test_a_signal_that_was_ignored_stays_ignored(script):
    path = script("print('ready', flush=True); time.sleep(0.6); print('finished')")
    command = f"trap '' HUP; exec {shlex.join([*START, path])}"
    process = subprocess.Popen(["bash", "-c", command], stdout=subprocess.PIPE, text=True)
    try:
        assert "ready" in process.stdout.readline()
        process.send_signal(signal.SIGHUP)  # as after nohup
        assert "finished" in process.communicate(timeout=LIMIT_S)[0]
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


# --- on a terminal ------------------------------------------------------------------------------------


def on_a_terminal(*arguments, **environment):
    """The output on a terminal of 100 columns, and the exit code."""
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        [*START, *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=other_end,
        stderr=other_end,
        env=clean_environment(COLUMNS="100", **environment),
    )
    os.close(other_end)
    written, deadline = b"", time.monotonic() + LIMIT_S
    try:
        while time.monotonic() < deadline and select.select([terminal], [], [], LIMIT_S)[0]:
            try:
                piece = os.read(terminal, 65536)
            except OSError:
                break
            written += piece
        code = process.wait(LIMIT_S)
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    return written.decode(), code


STEPS = """
for step in range(1, 31):
    status = {"step": 10 * step, "time": 0.1 * step, "state": "training"}
    with open(os.environ["REPLICAX_STATUS_FILE"] + ".new", "w") as file:
        json.dump(status, file)
    os.replace(file.name, os.environ["REPLICAX_STATUS_FILE"])
    time.sleep(0.1)
print("done")
sys.exit(3 * (task == "worker 1"))
"""


@pytest.mark.rest
def test_a_table_of_the_tasks(script):
    text, code = on_a_terminal("--workers", 2, script(STEPS))
    assert code == 3
    bare = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text)
    assert re.search(r"task +state +pid +step +steps/s +memory +restarts", bare)
    assert re.search(r"worker 0 +training +\d+ +\d+ +100\.0 +\d+ MB +0", bare)
    assert re.search(r"worker 1 +exited with code 3 +\d+ +300 +– +– +0", bare)
    assert "worker 0 | done" in bare
    assert "\x1b[36mworker 0 | \x1b[0mdone" in text, "the prefix has no colour, or the line has one"
    assert bare.count("steps/s") >= 4, "it was not refreshed twice a second"


@pytest.mark.parametrize(
    ("options", "environment", "is_coloured"),
    [(["--plain"], {}, True), ([], {"TERM": "dumb"}, False), (["--plain"], {"NO_COLOR": "1"}, False)],
    ids=["plain", "dumb", "no colour"],
)
def test_plain_lines_on_a_terminal(script, options, environment, is_coloured):
    text, code = on_a_terminal("--workers", 2, *options, script("print('done')"), **environment)
    assert code == 0
    first, second = (
        ("\x1b[36mworker 0 | \x1b[0m", "\x1b[33mworker 1 | \x1b[0m")
        if is_coloured
        else ("worker 0 | ", "worker 1 | ")
    )
    assert sorted(text.splitlines()) == sorted([f"{first}done", f"{second}done"])


def test_without_rich_plain_lines_are_printed(script, tmp_path):
    (tmp_path / "rich").mkdir()
    (tmp_path / "rich" / "__init__.py").write_text("raise ImportError('not here')")
    text, code = on_a_terminal(script("print('done')"), PYTHONPATH=str(tmp_path))
    assert code == 0
    assert text.splitlines() == ["\x1b[36mworker 0 | \x1b[0mdone"]


# --- several hosts ------------------------------------------------------------------------------------


def test_lines_to_paste(script, tmp_path):
    path = script("print(task, config['cluster'], sys.argv[1:], os.environ.get('JAX_NUM_CPU_DEVICES'))")
    hosts = tmp_path / "hosts"
    hosts.write_text("# all of them\nh0 slots=4\n\nh1:2222  # the other\n")
    two_devices = ["--devices-per-worker", 2]
    for arguments, devices in (["--hosts", "h0,h1:2222"], None), (["--hosts-file", hosts, *two_devices], 2):
        result = launch(*arguments, "--port", 7000, path, "a b")
        assert result.returncode == 0, result.stderr
        first, first_line, second, second_line = result.stdout.splitlines()
        assert (first, second) == ("# on h0:", "# on h1:")
        for index, line in enumerate((first_line, second_line)):
            printed = subprocess.run(
                ["bash", "-c", line.replace("python3", sys.executable)],
                capture_output=True,
                text=True,
                check=True,
                timeout=LIMIT_S,
                env=clean_environment(REPLICAX_RESTART_COUNT="0"),
            ).stdout
            assert printed == f"worker {index} {{'worker': ['h0:7000', 'h1:2222']}} ['a b'] {devices}\n"


def test_the_task_of_this_host(script):
    path = script("print(task, config['cluster'])")
    result = launch("--hosts", "h0,h1", "--task-index", 1, path)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "worker 1 | worker 1 {'worker': ['h0:12345', 'h1:12345']}\n"


def test_a_single_task_that_fails_ends_the_launch_at_once(script):
    began = time.monotonic()
    result = launch("--grace", 60, script("sys.exit(3)"))
    assert result.returncode == 3
    assert time.monotonic() - began < 30


# --- GPUs ---------------------------------------------------------------------------------------------

SEES = "print(task, os.environ['CUDA_VISIBLE_DEVICES'])"


def with_gpus(folder, num_gpus):
    """The PATH of a machine whose driver shows this number of GPUs; with None the driver does not answer."""
    stand_in = folder / "nvidia-smi"
    lines = "".join(f"GPU {n}: NVIDIA H200 (UUID: GPU-{n}{n})\\n" for n in range(num_gpus or 0))
    stand_in.write_text("#!/bin/sh\nexit 9\n" if num_gpus is None else f"#!/bin/sh\nprintf '{lines}'\n")
    stand_in.chmod(0o755)
    return os.pathsep.join([str(folder), os.environ["PATH"]])


@pytest.mark.parametrize(
    ("own", "seen"),
    [(None, ["0,1", "2,3"]), ("5,1,GPU-33,0", ["5,1", "GPU-33,0"])],
    ids=["all", "those of the user"],
)
def test_each_worker_sees_its_own_gpus(script, tmp_path, own, seen):
    environment = {} if own is None else {"CUDA_VISIBLE_DEVICES": own}
    options = ["--workers", 2, "--gpus-per-worker", 2, script(SEES)]
    result = launch(*options, PATH=with_gpus(tmp_path, 6), **environment)
    assert result.returncode == 0, result.stderr
    assert sorted(result.stdout.splitlines()) == [f"worker {n} | worker {n} {seen[n]}" for n in (0, 1)]


def test_worker_of_this_host_sees_the_requested_number_of_gpus(script, tmp_path):
    options = ["--hosts", "h0,h1", "--task-index", 1, "--gpus-per-worker", 2, script(SEES)]
    result = launch(*options, PATH=with_gpus(tmp_path, 4))
    assert result.stdout == "worker 1 | worker 1 0,1\n", result.stderr


@pytest.mark.parametrize(
    ("num_gpus", "own", "says"),
    [
        (3, None, "--gpus-per-worker 2 needs 4 GPUs for worker 0, worker 1, and there are 3 (0, 1, 2)"),
        (0, None, "and there are 0"),
        (8, "0,1,2", "and there are 3 (0, 1, 2)"),
        (8, "", "and there are 0"),
        (4, "0,1,2,4", "names GPU '4', and this machine has 4"),
        (4, "0,1,1,2", "names '1', or names it twice"),
        (4, "0,1,-1,2", "names '-1'"),
        (None, None, "nvidia-smi does not answer"),
    ],
)
def test_missing_gpus_raise(tmp_path, monkeypatch, capsys, num_gpus, own, says):
    from replicax.__main__ import main

    monkeypatch.setenv("PATH", with_gpus(tmp_path, num_gpus))
    if own is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    with pytest.raises(SystemExit) as caught:
        main(["launch", "--workers", "2", "--gpus-per-worker", "2", __file__])
    assert caught.value.code == 2
    assert says in capsys.readouterr().err.replace("\n", " ")


# --- what cannot be -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "which script?"),
        (["--workers", "2"], "which script?"),
        (["-m"], "-m needs the name of a module"),
        (["no/such/script.py"], "there is no script 'no/such/script.py' in "),
        (["--workers", "two", "x.py"], "'two' is not a whole number of at least 0"),
        (["--workers", "-1", "x.py"], "'-1' is not a whole number of at least 0"),
        (["--workers", "0", __file__], "at least one worker, or a chief"),
        (["--devices-per-worker", "0", "x.py"], "'0' is not a whole number of at least 1"),
        (["--gpus-per-worker", "1", "--devices-per-worker", "1", __file__], "choose one"),
        (["--grace", "soon", "x.py"], "'soon' is not a number of seconds"),
        (["--grace", "nan", "x.py"], "'nan' is not a number of seconds"),
        (["--worker", "2", "x.py"], "unrecognized arguments: --worker"),
        (["--task-index", "1", __file__], "--task-index needs --hosts"),
        (["--hosts", "a,b", "--task-index", "2", __file__], "there are 2 hosts, numbered from 0"),
        (["--hosts", "a,b", "--workers", "2", __file__], "one worker on each host"),
        (["--hosts", "a,b", "--max-restarts", "1", __file__], "--max-restarts needs --task-index"),
        (["--hosts", "a,,b", __file__], "it has no host"),
        (["--hosts", "a,a", __file__], "occurs 2 times"),
        (["--hosts", "a", "--hosts-file", "f", __file__], "not allowed with"),
        (["--hosts-file", "no/such/file", __file__], "--hosts-file cannot be read"),
    ],
)
def test_bad_options(capsys, arguments, says):
    from replicax.__main__ import main

    with pytest.raises(SystemExit) as caught:
        main(["launch", *arguments])
    assert caught.value.code == 2
    error = capsys.readouterr().err
    assert says in error.replace("\n", " ")
    assert error.startswith("usage: replicax launch [options] (script.py | -m module) [arguments ...]")


def test_unreadable_script(script, monkeypatch, capsys):
    from replicax.__main__ import main

    path = script("")
    # The system's answer is replaced, because root may read everything.
    monkeypatch.setattr(os, "access", lambda asked, mode: (str(asked), mode) != (path, os.R_OK))
    with pytest.raises(SystemExit) as caught:
        main(["launch", path])
    assert caught.value.code == 2
    assert f"the script '{path}' cannot be read" in capsys.readouterr().err


def test_help(capsys):
    from replicax.__main__ import main

    for arguments, says in (["--help"], "launch"), (["launch", "--help"], "REPLICAX_RESTART_COUNT"):
        with pytest.raises(SystemExit) as caught:
            main(arguments)
        assert caught.value.code == 0
        assert says in capsys.readouterr().out


def test_python_m_replicax(script):
    """The real command, with JAX."""
    result = subprocess.run(
        [sys.executable, "-m", "replicax", "launch", script("print('done')")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=clean_environment(
            PYTHONPATH=os.pathsep.join([str(Path(replicax.__path__[0]).parent), *sys.path])
        ),
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "worker 0 | done\n", "")


# --- the status of a job ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "lines"),
    [
        pytest.param(
            ["--ps", 1, "--script-in", "all"],
            ["chief 0  | {}", "ps 0     | none", "worker 0 | none"],
            id="ps",
        ),
        pytest.param(["--chief"], ["chief 0  | {0}", "worker 0 | {0}"], id="chief"),
        pytest.param(["--evaluator"], ["evaluator 0 | none", "worker 0    | {}"], id="evaluator"),
        pytest.param([], ["worker 0 | {0}", "worker 1 | {0}"], id="workers"),
    ],
)
def test_tasks_that_may_become_the_chief_get_a_status_address_which_is_printed(
    script, tmp_path, options, lines
):
    # The job ends with the chief, which therefore waits for what the others print.
    path = script(f"""
        from pathlib import Path
        print(os.environ.get("REPLICAX_STATUS_ADDRESS", "none"), flush=True)
        Path({str(tmp_path)!r}, task).touch()
        until = time.monotonic() + 60
        while len(list(Path({str(tmp_path)!r}).glob("* [01]"))) < {len(lines)} and time.monotonic() < until:
            time.sleep(0.01)
        """)
    result = launch("--workers", 1 if options else 2, *options, "--status", path)
    assert result.returncode == 0
    notes = [line for line in result.stderr.splitlines() if "waiting up to" not in line]  # for the evaluator
    shown = re.fullmatch(r"Status: http://(127\.0\.0\.1:\d+)/ and replicax top \1", "\n".join(notes))
    assert shown
    assert sorted(result.stdout.splitlines()) == [line.format(shown[1]) for line in lines]


def test_the_status_address_may_be_chosen(script):
    path = script("print(os.environ['REPLICAX_STATUS_ADDRESS'])")
    result = launch(
        "--ps", 1, "--script-in", "all", "--status", path, REPLICAX_STATUS_ADDRESS="127.0.0.1:8765"
    )
    assert "chief 0  | 127.0.0.1:8765\n" in result.stdout
    assert result.stderr == "Status: http://127.0.0.1:8765/ and replicax top 127.0.0.1:8765\n"


@pytest.mark.parametrize("arguments", [["--ps", 1, "--no-chief"], ["--ps", 1, "--script-in", "workers"]])
def test_status_of_parameter_servers_needs_a_coordinator(script, arguments):
    result = launch(*arguments, "--status", script("print('runs')"))
    assert result.returncode == 2
    assert "--status with parameter servers needs a coordinator" in result.stderr
    assert "runs" not in result.stdout

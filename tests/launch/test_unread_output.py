"""The launcher watches its tasks whether or not somebody reads what it shows: each act of the supervisor with a standard
output that is a full pipe, which nobody reads."""

import ast
import contextlib
import inspect
import os
import pty
import select
import signal
import subprocess
import sys
import threading
import time

import pytest

from replicax._launch import display as display_module
from replicax._launch import supervisor
from replicax._launch.display import Display, TaskRow
from replicax._launch.supervisor import Start, Supervisor, SupervisorOptions
from replicax._src.cluster import processes
from replicax._src.cluster.spec import Task

LIMIT_S = 60
AT_ONCE_S = 9.0  # less than any of the limits that would end the waiting, on a busy machine
WORKERS = [Task("worker", 0), Task("worker", 1)]
pytestmark = pytest.mark.timeout(180)

TASK = """
import os, signal, sys, time
task, how, folder = sys.argv[1:]
def say(what):
    with open(f"{folder}/{what} {task}", "a") as file:
        file.write("x")
def end(number, frame):
    os.write(1, b"saving " * 100_000)  # more than a pipe holds
    say("told")
    if how != "endless":
        os._exit(0)
def flood():
    while True:
        print("z" * 80)
signal.signal(signal.SIGTERM, end)
say("start")
"""
FLOODS = "flood()"
IS_QUIET = "while True: time.sleep(0.1)"


def ends_with(code, last="the last line"):
    """A task that ends when the test says so; after a restart at once."""
    return f"""
while not os.path.exists(f"{{folder}}/go"):
    time.sleep(0.01)
os.write(1, {last.encode()})
os._exit({code})
"""


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


@pytest.fixture
def unread():
    """A stream whose pipe is full, and which nobody reads."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x" * 4096)
    os.set_blocking(writer, True)
    stream = os.fdopen(writer, "w")
    yield stream
    os.close(reader)
    until(lambda: not any(t.name == "replicax-display" for t in threading.enumerate()), "the display's end")
    stream.close()


class Job:
    """A supervisor with an unread display, in this thread, and another thread that acts once the display is full."""

    def __init__(self, unread, folder, monkeypatch):
        monkeypatch.setattr(display_module, "_DRAIN_S", 0.2)
        self._unread, self._folder = unread, folder

    def run(self, *sources, act, how="ends", **options):
        """Returns the exit code, and the seconds from the act to the end. All tasks but floods are awaited."""
        starts = []
        for task, source in zip(WORKERS, sources, strict=False):
            script = self._folder / f"{task.index}.py"
            script.write_text(TASK + source)
            command = [sys.executable, "-I", "-S", str(script), str(task), how, str(self._folder)]
            starts.append(Start(task, command, {"REPLICAX_TOKEN": "t"}, is_awaited=source != FLOODS))
        display = Display(WORKERS, self._unread, self._unread, {}, is_plain=True)
        acted_at = []

        def wait_and_act():
            until(lambda: display.is_full and self.num("start") == len(starts), "the flood")
            acted_at.append(time.monotonic())
            act()

        acting = threading.Thread(target=wait_and_act)
        acting.start()
        try:
            code = Supervisor(starts, display, SupervisorOptions(**options)).run()
            return code, time.monotonic() - acted_at[0]
        finally:
            display.close()
            acting.join()

    def num(self, what):
        """The number of times that tasks have left a file."""
        return sum(len(path.read_text()) for path in self._folder.glob(f"{what} worker *"))


@pytest.fixture
def job(unread, tmp_path, monkeypatch):
    return Job(unread, tmp_path, monkeypatch)


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_tasks_are_told_of_a_signal_and_may_print_while_they_save(job, number, code):
    found, took_s = job.run(FLOODS, IS_QUIET, act=lambda: os.kill(os.getpid(), number), grace_s=LIMIT_S)
    assert found == code
    assert job.num("told") == 2
    assert took_s < AT_ONCE_S


def test_second_signal_kills(job):
    def interrupt_twice():
        os.kill(os.getpid(), signal.SIGINT)
        until(lambda: job.num("told") == 2, "both tasks are told")
        os.kill(os.getpid(), signal.SIGINT)

    code, took_s = job.run(FLOODS, IS_QUIET, how="endless", act=interrupt_twice, grace_s=LIMIT_S)
    assert code == 130
    assert took_s < AT_ONCE_S


def test_failed_task_is_noticed_and_the_others_are_told_and_killed(job, tmp_path):
    act = (tmp_path / "go").touch
    code, took_s = job.run(FLOODS, ends_with(9), how="endless", act=act, grace_s=0.5)
    assert code == 9
    assert job.num("told") == 1
    assert took_s < AT_ONCE_S


def test_job_restarts(job, tmp_path):
    act = (tmp_path / "go").touch
    code, _ = job.run(FLOODS, ends_with(9), act=act, grace_s=0.2, max_restarts=1)
    assert code == 9
    assert job.num("start") == 4


def test_end_of_the_program_is_noticed(job, tmp_path):
    code, took_s = job.run(FLOODS, ends_with(0), act=(tmp_path / "go").touch)
    assert code == 0
    assert job.num("told") == 1
    assert took_s < AT_ONCE_S


def test_orphan_that_keeps_writing_does_not_hide_the_end_of_its_task(job, tmp_path):
    leaves = f"if os.fork() == 0: flood()\n{ends_with(5, last='')}"  # the pipe is full, so a line would have to wait
    code, took_s = job.run(leaves, act=(tmp_path / "go").touch)
    assert code == 5
    assert took_s < AT_ONCE_S


# --- the display ------------------------------------------------------------------------------------------


def test_display_never_waits_and_its_end_is_bounded(unread, tmp_path, monkeypatch):
    monkeypatch.setattr(display_module, "_DRAIN_S", 0.2)
    notes = (tmp_path / "notes").open("w")
    display = Display(WORKERS, unread, notes, {}, is_plain=True, log_dir=tmp_path)
    began = time.monotonic()
    for number in range(3000):
        display.started(WORKERS[0], 0)
        display.line(WORKERS[0], f"line {number}")
        display.note("a message")
        display.update([TaskRow(WORKERS[0], "running")])
    assert display.is_full
    display.close()
    assert time.monotonic() - began < AT_ONCE_S
    notes.close()
    said = (tmp_path / "notes").read_text().splitlines()[-1]
    assert said.startswith("Nobody has read the output for 0.2 s. Up to ")
    logged = (tmp_path / "worker-0.log").read_text().splitlines()
    assert [line for line in logged if line.startswith("line")] == [f"line {n}" for n in range(3000)]


def test_all_lines_are_shown_if_somebody_reads(tmp_path):
    path = tmp_path / "shown"
    with path.open("w") as stream, contextlib.closing(Display(WORKERS, stream, stream, {})) as display:
        for number in range(20_000):
            display.line(WORKERS[number % 2], f"line {number}")
    assert path.read_text() == "".join(f"worker {n % 2} | line {n}\n" for n in range(20_000))


def test_error_while_showing_ends_the_job_and_is_raised(tmp_path, monkeypatch):
    def fail(self, entry):
        raise RuntimeError("cannot be shown")

    monkeypatch.setattr(Display, "_shown", fail)
    start = Start(WORKERS[0], [sys.executable, "-I", "-S", "-u", "-c", "while True: print('z' * 80)"], {})
    with (tmp_path / "shown").open("w") as stream:
        display = Display(WORKERS, stream, stream, {})
        assert Supervisor([start], display, SupervisorOptions()).run() == 141
        with pytest.raises(RuntimeError, match="cannot be shown"):
            display.close()


def test_characters_that_the_encoding_lacks_become_escapes(tmp_path):
    path = tmp_path / "shown"
    with (
        path.open("w", encoding="ascii") as stream,
        contextlib.closing(Display(WORKERS, stream, stream, {})) as display,
    ):
        display.line(WORKERS[0], "drei ü, 五")
    assert path.read_text() == "worker 0 | drei \\xfc, \\u4e94\n"


@pytest.mark.parametrize(
    "module", [supervisor, processes], ids=lambda module: module.__name__.rpartition(".")[2]
)
def test_only_the_display_writes(module):
    """What a supervisor, a signal handler or a reader of a process writes itself could block it."""
    called = [
        node.func for node in ast.walk(ast.parse(inspect.getsource(module))) if isinstance(node, ast.Call)
    ]
    names = {each.attr if isinstance(each, ast.Attribute) else getattr(each, "id", "") for each in called}
    assert not names & {"print", "write", "writelines", "flush"}


def test_signals_that_interrupt_the_waiting_block_nothing():
    """A handler runs between two instructions of the thread that waits, so it may not take a lock of that thread."""
    display = Display(WORKERS, sys.__stdout__, sys.__stderr__, {}, is_plain=True)
    waiting = Supervisor([], display, SupervisorOptions())
    before = signal.signal(signal.SIGALRM, waiting.notice)
    signal.setitimer(signal.ITIMER_REAL, 0.0002, 0.0002)
    try:
        waiting._wait(lambda: len(waiting._signals) >= 1000, num_signals=10**9)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        display.close()


# --- on a terminal ----------------------------------------------------------------------------------------

TALKS = """
import time
while True:
    print("z" * 80, flush=True)
    time.sleep(1 / 2000)
"""


def test_ctrl_c_acts_at_once_while_tasks_print_2000_lines_a_second_above_the_table(tmp_path):
    script = tmp_path / "talks.py"
    script.write_text(TALKS)
    terminal, other_end = pty.openpty()
    process = subprocess.Popen(
        ["setsid", "--ctty", sys.executable, "-m", "replicax", "launch", "--workers", "2", str(script)],
        stdin=other_end,
        stdout=other_end,
        stderr=other_end,
        env={**os.environ, "TERM": "xterm-256color", "COLUMNS": "100", "LINES": "30"},
    )
    os.close(other_end)
    text, interrupted_at, began = b"", None, time.monotonic()
    try:
        while time.monotonic() < began + LIMIT_S and select.select([terminal], [], [], LIMIT_S)[0]:
            try:
                text += os.read(terminal, 65536)
            except OSError:
                break
            if interrupted_at is None and text.count(b"zzz") > 4000:
                interrupted_at = time.monotonic()
                os.write(terminal, b"\x03")
        ended_at = time.monotonic()
        assert process.wait(LIMIT_S) == 130
    finally:
        process.kill()
        process.wait()
        os.close(terminal)
    assert b"steps/s" in text
    assert b"SIGINT: ending worker 0, worker 1." in text
    assert ended_at - interrupted_at < AT_ONCE_S

"""Processes are watched, obey signals, and leave nothing behind: not when they are closed, nor when their parent is
killed."""

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from checks import is_there
from replicax._src.cluster import processes
from replicax._src.cluster.processes import Process, ProcessStartError, ProcessTimeoutError, resident_bytes

LIMIT_S = 50
ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="Linux has what others lack")
pytestmark = pytest.mark.timeout(180)


def python(program, *arguments, **options):
    command = [sys.executable, "-I", "-S", "-u", "-c", textwrap.dedent(program), *map(str, arguments)]
    return Process(command, **options)


def until(condition, what, limit_s=LIMIT_S):
    deadline = time.monotonic() + limit_s
    while not (result := condition()):
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)
    return result


def has_no_more_lines(process):
    """The test runs for a while; one that counts has 20 lines."""
    before = len(process.lines)
    time.sleep(0.2)
    return len(process.lines) == before


def lines_of(program, *arguments):
    with python(program, *arguments) as process:
        process.wait(LIMIT_S)
        return process.lines


# --- output -------------------------------------------------------------------------------------------


def test_both_streams_are_read_in_order_and_an_unfinished_line_counts():
    program = """
    import sys
    print("one"); print("two", file=sys.stderr); print(); print("drei ü"); sys.stdout.write("last")
    """
    assert lines_of(program) == ("one", "two", "", "drei ü", "last")


def test_carriage_returns_end_lines_too():
    program = r"""
    import os, time
    os.write(1, b"a\r\nb\r"); time.sleep(0.1); os.write(1, b"\n\r 10%\r 20%\n\xff\r")
    """
    assert lines_of(program) == ("a", "b", " 10%", " 20%", "�")


def test_a_line_that_does_not_end_is_cut():
    lines = lines_of("import os\nfor _ in range(5): os.write(1, b'x' * 50_000)")
    assert len(lines) > 1
    assert "".join(lines) == "x" * 250_000


def test_all_lines_are_delivered_and_the_last_are_kept():
    got = []
    with python("for i in range(5000): print(i)", num_lines_kept=3, on_line=got.append) as process:
        process.wait(LIMIT_S)
        assert got == [str(i) for i in range(5000)]
        assert process.lines == ("4997", "4998", "4999")
        assert process.statistics() == {"pid": process.pid, "num_lines": 5000, "num_lines_kept": 3}


def test_error_of_the_line_callback_is_raised_and_does_not_block_the_process():
    def fail(line):
        raise OSError("disk full")

    with python("for i in range(100_000): print(i)", on_line=fail) as process:
        with pytest.raises(OSError, match="disk full"):
            process.wait(LIMIT_S)
        assert process.wait(LIMIT_S).is_success
        assert process.lines[-1] == "99999"


def test_output_of_child_processes_continues():
    program = """
    import subprocess, sys
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.2); print('later', flush=True); time.sleep(60)"])
    """
    with python(program) as process:
        assert process.wait(LIMIT_S).is_success
        until(lambda: process.lines == ("later",), "the line of the child")


# --- how it starts and ends ---------------------------------------------------------------------------


@pytest.mark.parametrize(("code", "text"), [(0, "exited with code 0"), (3, "exited with code 3")])
def test_exit_code(code, text):
    with python(f"raise SystemExit({code})") as process:
        ending = process.wait(LIMIT_S)
        assert (ending.code, ending.signal, ending.exit_code) == (code, None, code)
        assert str(ending) == text
        assert ending.is_success == (code == 0)
        assert process.ending is ending
        assert not process.is_running


def test_end_is_reported_when_it_is_known():
    has_ended = threading.Event()
    with python("raise SystemExit(3)", on_end=has_ended.set) as process:
        assert has_ended.wait(LIMIT_S)
        assert process.ending.code == 3


def test_death_by_a_signal():
    with python("import time; time.sleep(60)") as process:
        assert process.is_running
        assert process.ending is None
        process.kill()
        ending = process.wait(LIMIT_S)
        assert (ending.code, ending.signal, ending.exit_code) == (None, signal.SIGKILL, 137)
        assert str(ending) == "was killed by SIGKILL"
        process.kill()
        process.terminate()
        process.stop()


def test_time_of_the_end_shows_which_process_was_first():
    """The order of the questions does not matter."""
    with python("import time; time.sleep(60)") as late, python("") as early:
        until(lambda: not early.is_running, "its end")
        late.kill()
        assert late.wait(LIMIT_S).time > early.wait(LIMIT_S).time
        assert late.ending.time < time.monotonic()


def test_environment_directory_and_input(tmp_path):
    program = "import os, sys; print(sorted(os.environ.items()), os.getcwd(), repr(sys.stdin.read()))"
    with python(program, environment={"A": "b", "LC_CTYPE": "C.UTF-8"}, directory=tmp_path) as process:
        process.wait(LIMIT_S)
        assert process.lines == (f"[('A', 'b'), ('LC_CTYPE', 'C.UTF-8')] {tmp_path} ''",)


def test_process_has_its_own_session_and_ignores_no_signal():
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        command = ["sh", "-c", "ps -o sid=,pid= -p $$; grep SigIgn /proc/$$/status; ls /proc/$$/fd"]
        with Process(command) as process:
            process.wait(LIMIT_S)
            (session, pid), ignored, *descriptors = [line.split() for line in process.lines]
    finally:
        signal.signal(signal.SIGTERM, before)
    assert session == pid == str(process.pid)
    handled = [signal.SIGHUP, signal.SIGINT, signal.SIGTERM]
    assert not int(ignored[1], 16) & sum(1 << (number - 1) for number in handled)
    assert len(descriptors) == 3, "it has inherited descriptors"


def test_failed_start_says_why(tmp_path):
    with pytest.raises(ProcessStartError, match=r"worker 0.*'no-such-program'"):
        Process(["no-such-program"], name="worker 0")
    with pytest.raises(ProcessStartError, match=r"could not be started: .*nowhere"):
        Process(["ls"], directory=tmp_path / "nowhere")
    with pytest.raises(ProcessStartError, match="Permission denied"):
        Process([str(tmp_path)])


def test_waiting_is_bounded():
    with python("import time; print('busy'); time.sleep(60)", name="worker 3") as process:
        until(lambda: process.lines, "its line")
        began = time.monotonic()
        with pytest.raises(ProcessTimeoutError, match=r"worker 3 \(pid \d+\)(.|\n)*0.1 s(.|\n)*busy"):
            process.wait(0.1)
        assert time.monotonic() - began < LIMIT_S
        assert process.is_running


# --- obeying ------------------------------------------------------------------------------------------

COUNTING = "import time\nfor i in range(100_000): print(i); time.sleep(0.01)"


def test_stop_and_resume():
    with python(COUNTING) as process:
        until(lambda: process.lines, "counting")
        process.stop()
        until(lambda: has_no_more_lines(process), "the last line that it had written")
        before = len(process.lines)
        assert process.is_running
        process.resume()
        until(lambda: len(process.lines) > before, "counting on")


def test_a_stopped_process_can_be_killed_and_closed():
    with python(COUNTING) as process, python(COUNTING) as other:
        process.stop()
        process.kill()
        assert process.wait(LIMIT_S).signal == signal.SIGKILL
        other.stop()
    assert other.wait(0).signal == signal.SIGKILL


def test_terminate_allows_an_orderly_exit():
    program = """
    import signal, sys, time
    def end(number, frame):
        print("ending"); sys.exit(7)
    signal.signal(signal.SIGTERM, end)
    print("ready")
    time.sleep(60)
    """
    with python(program) as process:
        until(lambda: process.lines == ("ready",), "its start")
        process.terminate()
        assert process.wait(LIMIT_S).code == 7
        assert process.lines == ("ready", "ending")


@ON_LINUX
def test_memory():
    assert 1e6 < resident_bytes(os.getpid()) < 1e12
    with python("") as process:
        process.wait(LIMIT_S)
    assert resident_bytes(process.pid) is None


# --- leaving nothing ----------------------------------------------------------------------------------

# Starts a child in its group and one in a separate session, and prints their numbers.
FAMILY = """
import subprocess, sys, time
for own_session in (False, True):
    print(subprocess.Popen(["sleep", "60"], start_new_session=own_session).pid)
print("ready")
time.sleep({seconds})
"""


@ON_LINUX
@pytest.mark.parametrize("how", ["it runs", "it has ended", "it was killed", "it is stopped"])
def test_close_ends_the_process_and_its_children(how):
    with python(FAMILY.format(seconds=0 if how == "it has ended" else 60)) as process:
        until(lambda: process.lines[2:] == ("ready",), "its start")
        children = list(map(int, process.lines[:2]))
        if how == "it was killed":
            process.kill()
        if how == "it is stopped":
            process.stop()
        if how in ("it has ended", "it was killed"):
            process.wait(LIMIT_S)
        assert all(map(is_there, children))
    assert not any(map(is_there, (process.pid, *children)))
    assert not os.path.exists(f"/proc/{process.pid}")
    assert process.ending is not None
    process.close()
    process.kill()


@ON_LINUX
def test_close_ends_it_also_while_nobody_reads_its_output():
    def take(line):
        lines.append(line)
        if line == "ready":
            until(lambda: not any(map(is_there, children())), "the end of the children")

    def children():
        return map(int, lines[:2])

    lines = []
    family = FAMILY.format(seconds=60).replace('print("ready")', "print('ready\\n' + 'x' * 500_000)")
    with python(family, on_line=take) as process:
        until(lambda: "ready" in lines, "its start")
        assert all(map(is_there, children()))
        process.kill()
        time.sleep(0.5)  # the guard knows, and cannot say it
    assert not any(map(is_there, (process.pid, *children())))


def test_lines_are_not_cut_by_the_start():
    """The command writes more than a pipe holds while its guard reports that it has started."""
    for _ in range(10):
        with python(
            "print('x' * 79 + '\\n' * 1, end='') or [print('y' * 79) for _ in range(10_000)]",
            num_lines_kept=20_000,
        ) as process:
            process.wait(LIMIT_S)
            assert {len(line) for line in process.lines} == {79}


@pytest.mark.parametrize("num_forks", [1, 3])
def test_end_is_noticed_while_its_children_write(num_forks):
    forks = (
        "import os, sys, time\n"
        + f"for _ in range({num_forks}):\n    if not os.fork():\n        while True: print('x' * 70)\n"
    )
    with python(forks + "time.sleep(0.1)") as process:
        started = time.monotonic()
        process.wait(LIMIT_S)
        assert time.monotonic() - started < LIMIT_S / 2
    assert process.ending.code == 0


def test_end_is_noticed_while_a_child_writes_faster_than_its_lines_are_taken():
    program = f"""
    import subprocess, time
    subprocess.Popen(["yes", {"x" * 1000!r}]); time.sleep(0.1)
    """
    with python(program, on_line=lambda line: time.sleep(0.002)) as process:
        assert process.wait(LIMIT_S).code == 0


def test_command_waits_while_its_output_is_held_and_nothing_is_lost():
    is_held, has_written = threading.Event(), threading.Event()
    is_held.set()

    def take(line):
        if line == "all":
            has_written.set()

    program = "for i in range(50_000): print(i)\nprint('all')"
    with python(program, num_lines_kept=60_000, on_line=take, is_held=is_held.is_set) as process:
        assert not has_written.wait(0.3)
        assert process.is_running
        assert process.lines == ()
        is_held.clear()
        assert process.wait(LIMIT_S).code == 0
        assert process.lines == (*map(str, range(50_000)), "all")


def test_end_is_noticed_while_output_is_held_and_what_the_pipe_held_is_read():
    program = """
    import os
    print("last"); os._exit(3)
    """
    with python(program, is_held=lambda: True) as process:
        assert process.wait(LIMIT_S).code == 3
        assert process.lines == ("last",)


@ON_LINUX
def test_pid_is_not_reused_before_close():
    with python("") as process:
        process.wait(LIMIT_S)
        time.sleep(0.5)
        assert os.path.exists(f"/proc/{process.pid}")
    assert not os.path.exists(f"/proc/{process.pid}")


def test_no_descriptor_and_no_thread_is_left():
    def threads():
        return set(threading.enumerate())

    before, num_descriptors = threads(), len(os.listdir("/dev/fd"))  # some of earlier tests may be ending
    for _ in range(3):
        with python("print(1)") as process:
            process.wait(LIMIT_S)
    with pytest.raises(ProcessStartError):
        Process(["no-such-program"])
    until(lambda: threads() <= before and len(os.listdir("/dev/fd")) <= num_descriptors, "all is given back")


def test_process_outlives_its_starting_thread():
    started = []
    thread = threading.Thread(target=lambda: started.append(python("import time; time.sleep(60)")))
    thread.start()
    thread.join()
    with started[0] as process:
        time.sleep(0.4)
        assert process.is_running


PARENT = """
import os, sys, threading, time, types
sys.modules["replicax"] = package = types.ModuleType("replicax")  # without its imports: JAX takes a second
package.__path__ = [sys.argv[1]]
from replicax._src.cluster.processes import Process
is_ready = threading.Event()
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # whole lines, whichever thread or process writes
    if words == ("ready",):
        is_ready.set()
process = Process([sys.executable, "-u", "-c", sys.argv[2]], on_line=say)
say("pid", process.pid, process._guard.pid)
if sys.argv[3] == "fork":  # a child that holds all descriptors
    if os.fork() == 0:
        os.setsid()
        say("forked", os.getpid())
        time.sleep(60)
        os._exit(0)
if sys.argv[3] == "exit":
    is_ready.wait(60)  # all that it has started has said so
    sys.exit()
time.sleep(60)
"""


@ON_LINUX
@pytest.mark.parametrize("how", ["kill", "kill the group", "exit", "fork"])
def test_all_processes_end_soon_after_the_parent(how):
    package = os.path.dirname(os.path.dirname(os.path.dirname(processes.__file__)))
    program = FAMILY.format(seconds=60)
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, package, program, how],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    numbers, forked = [], []
    try:
        while len(numbers) < 4 or (how == "fork" and not forked):
            line = parent.stdout.readline()
            assert line, "the parent has ended"
            (forked if line.startswith("forked") else numbers).extend(
                int(w) for w in line.split() if w.isdigit()
            )
        if how == "kill the group":
            os.killpg(parent.pid, signal.SIGKILL)
        elif how != "exit":
            parent.kill()
        parent.wait(LIMIT_S)
        until(lambda: not any(map(is_there, numbers)), "everything gone")
        assert all(map(is_there, forked))
    finally:
        for pid in forked:
            os.kill(pid, signal.SIGKILL)
        parent.kill()
        parent.wait()
        parent.stdout.close()


@ON_LINUX
def test_process_dies_with_its_guard():
    with python("import time; time.sleep(60)") as process:
        process._guard.kill()
        assert process.wait(LIMIT_S).signal == signal.SIGKILL
        until(lambda: not is_there(process.pid), "its end")


def test_folder_is_removed_after_close_for_any_ending(tmp_path):
    for how in ("it has ended", "its guard was killed", "it was not started"):
        folder = tmp_path / how
        folder.mkdir()
        (folder / "file").touch()
        if how == "it was not started":
            with pytest.raises(ProcessStartError):
                Process(["no-such-program"], own_folder=folder)
        else:
            with python("import time; time.sleep(60)", own_folder=folder) as process:
                process._guard.kill() if how == "its guard was killed" else process.kill()
                process.wait(LIMIT_S)
                assert folder.exists()
        assert not folder.exists()


@ON_LINUX
@pytest.mark.parametrize("error", [KeyboardInterrupt, None], ids=["interrupted", "too slow"])
def test_failed_start_leaves_nothing(monkeypatch, tmp_path, error):
    """The parent ends while the command starts, which takes some 30 ms."""

    class Impatient(threading.Event):
        def wait(self, timeout_s=None):
            if timeout_s == 0.0 and error is not None:
                raise error
            return super().wait(timeout_s)

    monkeypatch.setattr(processes, "_START_TIMEOUT_S", 0.0)
    monkeypatch.setattr(processes.threading, "Event", Impatient)
    with pytest.raises(error or ProcessStartError):
        python("import time; time.sleep(60)", tmp_path)
    assert not [pid for pid in filter(str.isdigit, os.listdir("/proc")) if str(tmp_path) in command_of(pid)]


def command_of(pid):
    try:
        with open(f"/proc/{pid}/cmdline") as file:
            return file.read()
    except OSError:  # it has ended meanwhile
        return ""

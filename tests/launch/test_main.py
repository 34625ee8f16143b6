"""``replicax`` itself: its summary, its version, and its answers to unknown words."""

import os
import subprocess
import sys

import pytest

import replicax as rx
from replicax.__main__ import main
from replicax._launch.command_line import COMMANDS


def test_bare_command_prints_a_summary(capsys):
    assert main([]) == 0
    printed = capsys.readouterr().out
    for command in COMMANDS:
        assert f"  replicax {command.__name__.rpartition('.')[2].replace('_', '-')}" in printed
    assert rx.__version__ in printed


def test_the_version(capsys):
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"replicax {rx.__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["lauch"], "there is no command 'lauch'. Did you mean 'launch'?"),
        (["start", "train.py"], "replicax launch --workers 2 train.py; in one: python train.py"),
        (
            ["mpi-collectives", "build"],
            "there is no command 'mpi-collectives' any more: workers on CPUs communicate by gloo",
        ),
        (["docter", "--json"], "Did you mean 'doctor'?"),
        (
            ["launch", "--worker", "2", "train.py"],
            "unrecognized arguments: --worker. Did you mean '--workers'?",
        ),
        (["launch", "--worker=2", "train.py"], "Did you mean '--workers'?"),
        (["doctor", "--jsn"], "Did you mean '--json'?"),
        (["top", "--onec"], "Did you mean '--once'?"),
        (["launch", "--zzz", "train.py"], "unrecognized arguments: --zzz\n"),
        (
            ["run", "-n", "2", "train.py"],
            "-n. To run a script in two processes on this machine: replicax launch",
        ),
        (
            ["run", "--workers=2", "train.py"],
            "To run a script in two processes on this machine: replicax launch",
        ),
        (
            ["launch", "--nproc_per_node=2", "train.py"],
            "=2. To run a script in two processes on this machine:",
        ),
        (["launch", "-np", "2", "train.py"], "-np. To run a script in two processes on this machine:"),
        (["run", "--max-restarts", "3", "train.py"], "It is an option of replicax launch"),
        (["top", "-n", "2"], "unrecognized arguments: -n\n"),
    ],
)
def test_a_mistyped_word_gets_the_right_one(capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("command", ["launch", "run", "server", "top", "plan", "export", "migrate", "doctor"])
def test_every_command_has_help(capsys, command):
    with pytest.raises(SystemExit) as end:
        main([command, "--help"])
    assert end.value.code == 0
    assert f"usage: replicax {command}" in capsys.readouterr().out


def test_run_is_python_with_what_slurm_says(tmp_path):
    """It replaces its process; a wrong script or Keras's wrong backend ends it before."""
    (tmp_path / "train.py").write_text(
        "import os, sys\nprint(__name__, sys.argv[1:], os.environ['REPLICAX_RESTART_COUNT'], os.getpid())\n"
    )
    (tmp_path / "keras_script.py").write_text("import keras, replicax\n")
    environ = {**os.environ, "SLURM_RESTART_COUNT": "2", "KERAS_BACKEND": "torch"}
    command = [sys.executable, "-m", "replicax", "run"]
    with subprocess.Popen(
        [*command, "train.py", "--x", "1"], cwd=tmp_path, env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate(timeout=200)
    assert out == f"__main__ ['--x', '1'] 2 {process.pid}\n"
    done = subprocess.run(
        [*command, "keras_script.py"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 2
    assert "keras_script.py, line 1, imports Keras." in done.stderr


INTERRUPTED = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupts())
from replicax.__main__ import main
sys.exit(main(sys.argv[2:]))
"""


def test_ctrl_c_while_the_command_starts_ends_it_with_130_and_without_a_traceback():
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED, "replicax._launch.launch", "launch", "replicax"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_ctrl_c_that_a_command_does_not_handle_is_130(monkeypatch):
    def interrupted(options):
        raise KeyboardInterrupt

    monkeypatch.setattr("replicax._launch.export.run", interrupted)
    assert main(["export", "somewhere", "--to", "x.safetensors"]) == 130


@pytest.mark.parametrize("closed", [">&-", pytest.param("2>&-", marks=pytest.mark.rest), "<&- >&- 2>&-"])
@pytest.mark.parametrize("command", ["launch --plain", "run"])
def test_closed_standard_streams_are_no_error(tmp_path, command, closed):
    (tmp_path / "train.py").write_text(
        "import sys; print('shown'); print('shown', file=sys.stderr); open('ran', 'w').close()"
    )
    line = f"{sys.executable} -m replicax {command} train.py {closed}"
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0
    assert (tmp_path / "ran").exists()
    assert "Error" not in done.stdout + done.stderr


FULL = "/dev/full"


@pytest.mark.skipif(not os.path.exists(FULL), reason="this system has no /dev/full")
@pytest.mark.parametrize("arguments", [[], ["launch", "--plain", "--grace", "1"]])
def test_a_full_disk_behind_standard_output_is_named(tmp_path, arguments):
    """It is no reader that has left (SIGPIPE), and no traceback."""
    script = tmp_path / "train.py"
    script.write_text("import time\nwhile True: print('x', flush=True); time.sleep(0.01)")
    is_launch = "launch" in arguments
    command = [
        sys.executable,
        "-m",
        "replicax",
        *arguments,
        *(["--workers", "1", str(script)] if is_launch else []),
    ]
    with open(FULL, "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 1
    assert "cannot be written: its disk is full" in done.stderr
    assert "Traceback" not in done.stderr
    assert "SIGPIPE" not in done.stderr


def test_a_reader_that_has_left_is_no_error():
    command = [sys.executable, "-m", "replicax"]
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as unread:
        done = subprocess.run(command, stdout=unread, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (141, "")

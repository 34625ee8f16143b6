"""``replicax launch --on slurm`` without Slurm: the batch script, the options, and the job that it follows, with commands of
Slurm that a test plays. ``tests/engines/test_slurm.py`` runs the real ones."""

import os
import pty
import select
import signal
import subprocess
import sys
import time

import pytest

from replicax.__main__ import main
from replicax._launch.batch_script import BatchJob
from replicax._src.cluster.errors import ClusterError

pytestmark = pytest.mark.timeout(250)


@pytest.fixture
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("print('hello')\n")
    return "train.py"


@pytest.fixture
def command(tmp_path):
    """Writes a command in bash. It finds the folder in $FOLDER."""
    (tmp_path / "bin").mkdir()

    def write(name, text):
        path = tmp_path / "bin" / name
        path.write_text(f"#!/bin/bash\nFOLDER={tmp_path}\n{text}\n")
        path.chmod(0o755)

    return write


@pytest.fixture
def environ(tmp_path):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "REPLICAX_"))}
    return kept | {"PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"}


def dry_run(capsys, *arguments):
    assert main(["launch", "--on", "slurm", "--dry-run", *arguments]) == 0
    return capsys.readouterr().out


# --- the options ----------------------------------------------------------------------------------------


def test_the_options_of_sbatch(script, capsys):
    text = dry_run(
        capsys, "--nodes", "2", "--tasks-per-node", "4", "--gpus-per-worker", "2", "--time", "1-12", "--partition", "big",
        "--sbatch", "account=me", "--sbatch=--comment=two words", "--sbatch", "exclusive", script, "--lr", "0.1 or so",
    )  # fmt: skip
    directives = [line.removeprefix("#SBATCH --") for line in text.splitlines() if line.startswith("#SBATCH")]
    assert directives == [
        "job-name=train", "nodes=2", "ntasks-per-node=4", "gpus-per-node=8", "time=1-12", "partition=big",
        "output=train-%j.txt", "open-mode=append", "no-requeue", "account=me", 'comment="two words"', "exclusive",
    ]  # fmt: skip
    assert text.endswith(f" {sys.executable} train.py --lr '0.1 or so'\n")  # an absolute path


def test_a_job_that_may_restart_is_requeued_and_told_ahead_of_its_time_limit(script, capsys):
    text = dry_run(capsys, "--checkpoint-dir", "saved", "--devices-per-worker", "2", script)
    assert "#SBATCH --requeue\n#SBATCH --signal=TERM@120\n" in text
    assert f"export REPLICAX_CHECKPOINT_DIR={os.getcwd()}/saved\n" in text
    assert "export JAX_NUM_CPU_DEVICES=2\n" in text
    assert (
        dry_run(capsys, "--max-restarts", "1", "-m", "json.tool").count("#SBATCH --job-name=json.tool\n") == 1
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--on", "slurm", "--ps", "1"], "--ps has no meaning with --on slurm, which takes --checkpoint-dir"),
        (["--on", "slurm", "--workers", "2"], "--workers has no meaning with --on slurm"),
        (["--on", "slurm", "--hosts", "a,b"], "--hosts has no meaning with --on slurm"),
        (["--on", "slurm", "--sbatch=-pgpu"], "--sbatch '-pgpu' must be the long name of an option"),
        (["--on", "slurm", "--sbatch", 'comment="a'], 'without the character " and line breaks'),
        (["--on", "slurm", "--sbatch", "comment=a\nb"], 'without the character " and line breaks'),
        (["--on", "slurm", "--sbatch", "array=1-3"], "--sbatch 'array=1-3': the launcher follows one job"),
        (
            ["--on", "slurm", "--status"],
            "Instead export REPLICAX_STATUS_ADDRESS=0.0.0.0:8080 and a REPLICAX_TOKEN",
        ),
        (["--nodes", "2"], "--nodes needs --on slurm"),
        (["--sbatch", "account=me"], "--sbatch needs --on slurm"),
        (["--dry-run"], "--dry-run needs --on"),
        (
            ["--on", "slurm", "--time", "soon"],
            "--time 'soon' must be minutes, H:M:S, D-H:M:S or UNLIMITED, as in Slurm.",
        ),
        (
            ["--on", "slurm", "--time", "2", "--max-restarts", "1"],
            "--time 2 is 120 s. The tasks are told to save 120 s before the time limit",
        ),
    ],
)
def test_options_that_do_not_go_together(script, capsys, arguments, says):
    with pytest.raises(SystemExit) as end:
        main(["launch", *arguments, script])
    assert end.value.code == 2
    assert says in " ".join(capsys.readouterr().err.split())


def test_a_short_job_without_restarts_needs_no_signal():
    assert "signal" not in BatchJob(["train.py"], "python3", time="1").text()
    with pytest.raises(ClusterError):
        BatchJob(["train.py"], "python3", time="1-2-3")


@pytest.mark.parametrize("limit", ["0", "UNLIMITED"])
def test_a_job_may_have_no_time_limit(script, capsys, limit):
    assert f"#SBATCH --time={limit}\n" in dry_run(capsys, "--time", limit, "--max-restarts", "1", script)


def test_without_slurm_the_message_names_the_command(script, capsys, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    assert main(["launch", "--on", "slurm", script]) == 1
    assert "There is no command sbatch here." in capsys.readouterr().err


# --- the script -----------------------------------------------------------------------------------------

SRUN = """
read -r code rest < $FOLDER/codes
sed -i 1d $FOLDER/codes
echo "start $REPLICAX_RESTART_COUNT"
saved=$REPLICAX_CHECKPOINT_DIR/ckpt-$((1 + REPLICAX_RESTART_COUNT))
[ "$rest" != new ] || { mkdir -p $saved; echo '{"contents": {"number": '${saved##*-}'}}' > $saved/manifest.json; }
[ "$rest" != other ] || mkdir -p $saved
[ "$rest" != cancelled ] || echo COMPLETING > $FOLDER/state
exit $code
"""
SQUEUE = """case "$*" in *%k) cat $FOLDER/comment;; *%T) cat $FOLDER/state;; esac"""
SCONTROL = """
case "$*" in
    update*) text=$3; echo "${text#Comment=}" > $FOLDER/comment;;
    requeue*) echo "requeued $2"; exit 1;;  # the real one ends the script
esac
"""

SLEEP = "echo $1 >> $FOLDER/slept"


@pytest.fixture
def run_script(tmp_path, command, environ):
    """Runs the script of a job whose steps end with these codes, and returns the exit code, the numbers of its starts and
    the comment that Slurm keeps."""
    for name, text in {"srun": SRUN, "squeue": SQUEUE, "scontrol": SCONTROL, "sleep": SLEEP}.items():
        command(name, text)

    def run(codes, *, is_saving=False, is_long=False, max_restarts=0, comment="(null)", num_requeued=0):
        (tmp_path / "codes").write_text("\n".join(codes) + "\n")
        (tmp_path / "comment").write_text(f"{comment}\n")
        (tmp_path / "state").write_text("RUNNING\n")
        saved = tmp_path / "saved" if is_saving else None
        job = BatchJob(["train.py"], sys.executable, checkpoint_dir=saved, max_restarts=max_restarts)
        text = job.text().replace("ran < 30", f"ran < {0 if is_long else 30}")
        done = subprocess.run(
            ["bash", "-c", text],
            env=environ | {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(num_requeued)},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert not done.stderr
        starts = [int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("start")]
        outcome = "requeued" if "requeued 7" in done.stdout else done.returncode
        return outcome, starts, (tmp_path / "comment").read_text().strip()

    return run


@pytest.mark.parametrize(
    ("codes", "options", "expected"),
    [
        (["0"], {"max_restarts": 1}, (0, [0], "(null)")),
        (["3"], {}, (3, [0], "(null)")),
        (["3", "0"], {"max_restarts": 1}, (0, [0, 1], "replicax 1 1")),
        (["3", "4"], {"max_restarts": 1}, (4, [0, 1], "replicax 1 1")),
        (["3 new", "4 new", "0"], {"max_restarts": 1, "is_saving": True}, (0, [0, 1, 2], "replicax 0 2")),
        (["3 other", "4 other"], {"max_restarts": 1, "is_saving": True}, (4, [0, 1], "replicax 1 1")),
        (["3 new"], {"is_saving": True}, (3, [0], "(null)")),
        (["42 new"], {"is_saving": True}, ("requeued", [0], "replicax 0 0")),
        (["42"], {"is_saving": True, "is_long": True}, ("requeued", [0], "replicax 0 0")),
        (["42"], {"max_restarts": 1, "is_long": True}, ("requeued", [0], "replicax 0 0")),
        (["42"], {"max_restarts": 1}, ("requeued", [0], "replicax 1 0")),
        (
            ["42"],
            {"max_restarts": 1, "comment": "replicax 1 0", "num_requeued": 1},
            (42, [1], "replicax 1 0"),
        ),
        (["42"], {"is_saving": True}, ("requeued", [0], "replicax 1 0")),
        (
            ["42"],
            {"is_saving": True, "comment": "replicax 3 0", "num_requeued": 3},
            (42, [3], "replicax 3 0"),
        ),
        (["42"], {}, (42, [0], "(null)")),
        (["143"], {"max_restarts": 1}, ("requeued", [0], "replicax 1 0")),
        (["143"], {"is_saving": True}, (143, [0], "(null)")),
        (
            ["143"],
            {"max_restarts": 1, "comment": "replicax 1 0", "num_requeued": 1},
            (143, [1], "replicax 1 0"),
        ),
        (
            ["3", "0"],
            {"max_restarts": 2, "comment": "replicax 1 2", "num_requeued": 4},
            (0, [6, 7], "replicax 2 3"),
        ),
        (["42 cancelled"], {"is_saving": True}, (42, [0], "(null)")),
        (["3 cancelled"], {"max_restarts": 1}, (3, [0], "(null)")),
    ],
    ids=lambda value: str(value) if isinstance(value, list) else "",
)
def test_what_the_script_does_after_an_exit_code(run_script, codes, options, expected):
    assert run_script(codes, **options) == expected


def test_script_waits_longer_after_each_run_without_progress(tmp_path, run_script):
    run_script([*"3333333", "3 new", "3", "0"], max_restarts=9, is_saving=True)
    slept = (tmp_path / "slept").read_text().split()
    assert slept[::2] == ["2"] * 9  # before Slurm is asked
    assert slept[1::2] == ["1", "2", "4", "8", "16", "30", "30", "0", "1"]


def test_the_script_waits_for_its_step_when_it_is_signalled(tmp_path, command, environ, run_script):
    del run_script  # it wrote the other commands
    for name, text in {"comment": "", "state": "RUNNING\n"}.items():
        (tmp_path / name).write_text(text)
    command(
        "srun",
        "trap '/bin/sleep 0.5; echo saved; exit 42' TERM; echo ready; while :; do /bin/sleep 0.1; done",
    )
    job = BatchJob(["train.py"], sys.executable, max_restarts=1)
    environ = environ | {"SLURM_JOB_ID": "7"}
    process = subprocess.Popen(
        ["bash", "-c", job.text()], env=environ, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert process.stdout.readline() == "ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        out, _ = process.communicate(timeout=200)
    finally:
        process.kill()
        process.wait()
    assert "saved\n" in out
    assert "The tasks ended with exit code 42. Requeueing the job: restart 1 of 1.\n" in out
    assert "requeued 7\n" in out


# --- the job --------------------------------------------------------------------------------------------

SBATCH = """cat > $FOLDER/submitted; echo "7;cluster" """
SHOW = """
grep -q . $FOLDER/states || exit 1
read -r state reason code < $FOLDER/states
[ "$state" != lost ] || { echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1; }
[ "$state" != silent ] || { echo "Unable to contact slurm controller" >&2; sed -i 1d $FOLDER/states; exit 1; }
[ $(wc -l < $FOLDER/states) = 1 ] || sed -i 1d $FOLDER/states
cat <<END
JobId=7 JobName=train
   JobState=$state Reason=$reason Dependency=(null)
   Requeue=1 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=$code
   NodeList=n[1-2]
   StdOut=$FOLDER/a file-%j.txt
END
"""
SCANCEL = """echo "CANCELLED None 0:15" > $FOLDER/states"""


@pytest.fixture
def states(tmp_path, command, environ, monkeypatch, script):
    """Writes the states that Slurm tells about the job, one after the other."""
    monkeypatch.setenv("PATH", environ["PATH"])
    for name, text in {"sbatch": SBATCH, "scontrol": SHOW, "scancel": SCANCEL}.items():
        command(name, text)
    monkeypatch.setattr("replicax._launch.on_slurm._LEAST_PAUSE_S", 0.01)
    monkeypatch.setattr("replicax._launch.on_slurm._READ_S", 0.01)
    return lambda *lines: (tmp_path / "states").write_text("".join(f"{line}\n" for line in lines))


def test_a_job_is_followed_to_its_end(states, tmp_path, script, capsys):
    states(
        "PENDING Resources 0:0", "PENDING Resources 0:0", "silent", "RUNNING None 0:0", "COMPLETED None 0:0"
    )
    (tmp_path / "a file-7.txt").write_bytes(
        b"0: h\xc3\xa9llo\n"
        b"1: [Gloo] Rank 1 is connected to 1 peer ranks. Expected number of connected peer ranks is : 1\n"
        b"no end"
    )
    assert main(["launch", "--on", "slurm", script]) == 0
    out, err = capsys.readouterr()
    assert out == "0: héllo\nno end\n"
    assert err.splitlines() == [
        "Submitted job 7.",
        "Job 7 is PENDING (Resources)",
        "Slurm does not answer, and will be asked again: Unable to contact slurm controller",
        f"Job 7 is RUNNING on n[1-2], start 1. Its output: {tmp_path}/a file-7.txt",
        "Job 7 has ended: COMPLETED",
    ]
    assert (tmp_path / "submitted").read_text().startswith("#!/bin/bash\n#SBATCH --job-name=train\n")


@pytest.mark.parametrize(
    ("state", "code", "says"),
    [
        ("FAILED NonZeroExitCode 3:0", 3, "Job 7 has ended: FAILED"),
        ("CANCELLED None 0:15", 143, "Job 7 has ended: CANCELLED"),
        ("TIMEOUT TimeLimit 0:0", 1, "Job 7 has ended: TIMEOUT"),
        ("lost", 1, "Slurm does not know job 7 any more"),
    ],
)
def test_the_exit_code_is_that_of_the_job(states, script, capsys, state, code, says):
    states(state)
    assert main(["launch", "--on", "slurm", script]) == code
    err = capsys.readouterr().err
    assert says in err
    assert "The output cannot be read here: " in err


def test_a_job_that_sbatch_refuses(states, command, script, capsys):
    command("sbatch", "echo 'sbatch: error: invalid partition specified: big' >&2; exit 1")
    assert main(["launch", "--on", "slurm", "--partition", "big", script]) == 1
    assert (
        "sbatch refused the job: sbatch: error: invalid partition specified: big" in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("answer", "says", "is_cancelled"),
    [
        (b"n\n", "Job 7 continues. To cancel it: scancel 7.", False),
        (b"y\n", "Cancelling job 7. Its tasks get SIGTERM.", True),
        (b"\x04", "Job 7 continues. To cancel it: scancel 7.", False),
        (b"\x03", "Cancelling job 7. Its tasks get SIGTERM.", True),
    ],
    ids=["no", "yes", "end", "twice"],
)
def test_ctrl_c_asks_whether_to_cancel(states, tmp_path, script, answer, says, is_cancelled):
    states("RUNNING None 0:0")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", "import os, sys; os.setsid(); import fcntl, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n"
         "from replicax.__main__ import main; sys.exit(main(sys.argv[1:]))", "launch", "--on", "slurm", script],
        stdin=theirs, stdout=theirs, stderr=theirs,
    )  # fmt: skip
    os.close(theirs)
    text = b""

    def read_until(words, key=b""):
        """Presses the key again after a while: Ctrl-C has no effect on a process that is about to read."""
        nonlocal text
        deadline = time.monotonic() + 200
        while words not in text:
            assert time.monotonic() < deadline, text
            if select.select([ours], [], [], 2)[0]:
                text += os.read(ours, 4096)
            else:
                os.write(ours, key)

    try:
        read_until(b"RUNNING")
        os.write(ours, b"\x03")
        read_until(b"Cancel job 7? [y/N] ")
        os.write(ours, answer)
        read_until(says.encode(), answer)
        assert process.wait(200) == 130
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert (tmp_path / "states").read_text().startswith("CANCELLED") == is_cancelled


def test_ctrl_c_while_the_job_is_cancelled_ends_the_launcher(states, script, capsys, monkeypatch):
    def interrupted(job):
        raise KeyboardInterrupt

    monkeypatch.setattr("replicax._launch.on_slurm._Job.follow", interrupted)
    assert main(["launch", "--on", "slurm", script]) == 130
    assert "Job 7 may not have ended yet: squeue --jobs=7 shows it." in capsys.readouterr().err


@pytest.mark.parametrize("is_err_read", [True, False])
def test_a_job_whose_output_nobody_reads_continues(states, tmp_path, script, is_err_read):
    states("RUNNING None 0:0")
    (tmp_path / "a file-7.txt").write_text("a line\n")
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "replicax", "launch", "--on", "slurm", script],
            stdin=subprocess.DEVNULL, stdout=writer, stderr=subprocess.PIPE if is_err_read else writer,
            text=True, timeout=200, check=False,
        )  # fmt: skip
    finally:
        os.close(writer)
    assert done.returncode == 141
    if is_err_read:
        says = "The output is not read any more. Job 7 continues. To cancel it: scancel 7."
        assert done.stderr.splitlines()[-1].startswith(says)
    assert (tmp_path / "states").read_text().startswith("RUNNING")

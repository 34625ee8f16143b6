"""``replicax launch --groups``: the variables of all processes, the restarts of each group, and who ends when.

The syncers of most tests are a few lines.
"""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from argparse import Namespace
from pathlib import Path

import pytest

from checks import is_there
from replicax.__main__ import main
from replicax._launch import launched_groups, supervisor
from replicax._launch.group_endings import GroupEndings
from replicax._src.cluster.errors import ClusterError
from replicax._src.cluster.processes import Process

LIMIT_S = 60
pytestmark = pytest.mark.timeout(120)

OPTIONS = Namespace(
    groups=2, syncers=None, workers=None, chief=None, ps=0, evaluator=False, script_in=None, status=False,
    devices_per_worker=None, gpus_per_worker=None, replication=1, snapshot_dir=None, server_restarts=3,
    max_restarts=0, grace=LIMIT_S, checkpoint_dir=None,
)  # fmt: skip

# What scripts begin with.
TASK = """
import json, os, signal, sys, time
folder = sys.argv[1]
restart = int(os.environ["REPLICAX_RESTART_COUNT"])
group = os.environ.get("REPLICAX_GROUP")

def leave(name):
    with open(os.path.join(folder, name + ".new"), "w") as file:
        file.write(str(os.getpid()))
    os.rename(file.name, os.path.join(folder, name))

def wait_for(*names):
    while not all(os.path.exists(os.path.join(folder, name)) for name in names):
        time.sleep(0.01)
"""
# Its files are beside it. It is killed after its first start, and says when it is told to end.
SYNCER = (
    TASK.replace("sys.argv[1]", "os.path.dirname(os.path.abspath(__file__))")
    + """
assert group is None and sys.argv[1:] == ["--snapshot-dir", os.path.join(os.environ["REPLICAX_CHECKPOINT_DIR"])]
def end(number, frame):
    leave("syncer ended")
    sys.exit()
signal.signal(signal.SIGTERM, end)
print("at", os.environ["REPLICAX_SYNCERS"], "start", restart, flush=True)
leave(f"syncer started {restart}")
if not restart:
    os.kill(os.getpid(), signal.SIGKILL)
while True:
    time.sleep(0.01)
"""
)


def jobs(**options):
    told = launched_groups._jobs(Namespace(**{**vars(OPTIONS), **options}), ["train.py"])
    return {job.names[start.task]: (start, start.environment) for job in told for start in job.starts}


def test_each_group_is_a_cluster_of_its_own_and_all_know_the_syncers(tmp_path, monkeypatch):
    monkeypatch.delenv("REPLICAX_TOKEN", raising=False)
    told = jobs(workers=2, syncers=2, checkpoint_dir=tmp_path, max_restarts=1)
    workers = [f"group {group} worker {index}" for group in range(2) for index in range(2)]
    assert list(told) == [*workers, "syncer 0", "syncer 1"]
    configs = {name: json.loads(environment["TF_CONFIG"]) for name, (_, environment) in told.items()}
    syncers = configs["syncer 0"]["cluster"]["ps"]
    clusters = [configs[f"group {group} worker 0"]["cluster"]["worker"] for group in range(2)]
    addresses = [*clusters[0], *clusters[1], *syncers]
    assert len(addresses) == len(set(addresses)) == 6
    assert len({environment["REPLICAX_TOKEN"] for _, environment in told.values()}) == 1
    for name, (start, environment) in told.items():
        job, number, index = re.fullmatch(r"(\w+) (\d)(?: worker (\d))?", name).groups()
        assert environment["REPLICAX_SYNCERS"].split(",") == syncers
        assert environment["REPLICAX_TASKS_ON_HOST"] == "6"
        folder = "syncers" if job == "syncer" else f"group-{number}"
        assert environment["REPLICAX_CHECKPOINT_DIR"] == str(tmp_path / folder)
        if job == "group":
            assert configs[name]["task"] == {"type": "worker", "index": int(index)}
            assert configs[name]["cluster"] == {"worker": clusters[int(number)]}
            assert environment["REPLICAX_GROUP"] == f"{number}/2"
            assert start.is_awaited
        else:
            assert configs[name]["task"] == {"type": "ps", "index": int(number)}
            assert "REPLICAX_GROUP" not in environment
            assert environment["JAX_PLATFORMS"] == "cpu"
            assert start.command[-2:] == ["--snapshot-dir", str(tmp_path / "syncers")]
            assert start.max_restarts == 3


def test_groups_share_the_gpus_and_syncers_see_none(monkeypatch):
    monkeypatch.setattr(launched_groups, "visible_gpus", lambda environ: list("01234567"))
    told = jobs(workers=2, gpus_per_worker=2)
    seen = {name: environment["CUDA_VISIBLE_DEVICES"] for name, (_, environment) in told.items()}
    assert list(seen.values()) == ["0,1", "2,3", "4,5", "6,7", ""]
    with pytest.raises(ClusterError, match=r"--groups 5 with 2 GPU\(s\) each needs 10 GPUs, and there are 8"):
        jobs(groups=5, gpus_per_worker=2)


def test_each_group_serves_its_status_at_an_address_of_its_own(monkeypatch):
    monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", "127.0.0.1:8080")
    first, second, syncer = (each["REPLICAX_STATUS_ADDRESS"] for _, each in jobs(status=True).values())
    assert first == "127.0.0.1:8080"
    assert re.fullmatch(r"127\.0\.0\.1:\d+", second)
    assert second != first
    assert syncer == ""
    assert [each["REPLICAX_STATUS_ADDRESS"] for _, each in jobs().values()] == [first, "", ""]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--syncers", "2"], "--syncers needs --groups"),
        (["--groups", "0"], "'0' is not a whole number of at least 1"),
        (["--groups", "2", "--syncers", "0"], "'0' is not a whole number of at least 1"),
        (["--groups", "2", "--ps", "1"], "--ps does not go with --groups: the servers of groups are syncers"),
        (["--groups", "2", "--hosts", "a,b"], "--hosts does not go with --groups: --groups runs on this machine"),
        (["--groups", "2", "--hosts-file", "f"], "--hosts-file does not go with --groups"),
        (["--groups", "2", "--on", "slurm"], "set REPLICAX_GROUP and REPLICAX_SYNCERS for each process"),
        (["--groups", "2", "--evaluator"], "--evaluator does not go with --groups"),
        (["--groups", "2", "--chief"], "--chief does not go with --groups: worker 0 of each group is its chief"),
        (["--groups", "2", "--no-chief"], "--no-chief does not go with --groups"),
        (["--groups", "2", "--replication", "2"], "--replication does not go with --groups"),
        (["--groups", "2", "--workers", "auto"], "--workers auto does not go with --groups"),
        (["--groups", "2", "--workers", "0"], "--workers 0 does not go with --groups"),
    ],
)  # fmt: skip
def test_options_that_do_not_go_together(options, said, tmp_path, capsys):
    (tmp_path / "train.py").touch()
    with pytest.raises(SystemExit, match="2"):
        main(["launch", *options, str(tmp_path / "train.py")])
    assert said in capsys.readouterr().err


@pytest.fixture
def run(tmp_path, monkeypatch, capfd):
    """Runs groups of a script with syncers that are a script, both with the folder; returns the code and the output."""
    syncer, script = tmp_path / "syncer.py", tmp_path / "script.py"
    syncer.write_text(SYNCER)
    monkeypatch.setattr(launched_groups, "SERVER_COMMAND", ("-I", "-S", str(syncer)))

    def launch(source, *options):
        script.write_text(TASK + source)
        more = ["--plain", "--grace", str(LIMIT_S), "--checkpoint-dir", str(tmp_path / "saved")]
        code = main(["launch", "--groups", "2", *more, *options, str(script), str(tmp_path)])
        return code, *capfd.readouterr()

    return launch


FAILS = """
number = group[0]
print("restart", restart)
if number == "1":
    if restart < 2:
        sys.exit(7 + restart)
    time.sleep(60)
wait_for("syncer started 1", "group 1 has ended")
"""


def test_group_restarts_alone_and_its_failure_ends_nobody_else(run, tmp_path, monkeypatch):
    """Group 1 fails twice. Then group 0 ends, and the syncer after it."""
    ended, logs = GroupEndings.group_ended, tmp_path / "logs"

    def note_end(self, group, code):
        actions = ended(self, group, code)
        assert not (tmp_path / "syncer ended").exists()
        (tmp_path / f"{group} has ended").touch()
        return actions

    monkeypatch.setattr(GroupEndings, "group_ended", note_end)
    code, out, err = run(FAILS, "--max-restarts", "1", "--log-dir", str(logs))
    assert code == 8
    assert re.findall(r"group 1 +\| restart (\d)", out) == ["0", "1"]
    assert re.findall(r"group 0 +\| restart (\d)", out) == ["0"]
    assert len(set(re.findall(r"syncer 0 +\| at (\S+) start", out))) == 1
    assert re.findall(r"syncer 0 +\| .* start (\d)", out) == ["0", "1"]
    assert "group 1: Starting all tasks again: restart 1 of 1." in err
    assert "group 1 has failed, with exit code 8. It is not restarted. group 0 continues." in err
    assert "Failed: group 1 (exit code 8). Finished: group 0." in err
    assert (tmp_path / "syncer ended").exists()
    assert sorted(path.name for path in logs.iterdir()) == ["group-0.log", "group-1.log", "syncer-0.log"]


WAITS = """
signal.signal(signal.SIGTERM, lambda number, frame: (leave(f"told {group[0]}"), sys.exit(42)))
leave(f"group {group[0]}")
while True:
    time.sleep(0.01)
"""


def test_a_signal_ends_all_groups_and_syncers(run, tmp_path):
    def end():
        while not all((tmp_path / name).exists() for name in ("group 0", "group 1", "syncer started 1")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    code, _, err = run(WAITS, "--max-restarts", "5")
    assert code == 143
    assert "group 1: SIGTERM: ending worker 0." in err
    assert all((tmp_path / name).exists() for name in ("told 0", "told 1", "syncer ended"))
    assert not any(is_there(int((tmp_path / f"group {number}").read_text())) for number in range(2))


@pytest.mark.rest
def test_launcher_that_is_killed_leaves_no_process(tmp_path):
    (tmp_path / "syncer.py").write_text(SYNCER)
    (tmp_path / "script.py").write_text(TASK + WAITS)
    patched = f"""
import sys
from replicax._launch import supervisor, launched_groups
launched_groups.SERVER_COMMAND = ("-I", "-S", {str(tmp_path / "syncer.py")!r})
from replicax.__main__ import main
main(["launch", "--groups", "2", "--checkpoint-dir", {str(tmp_path)!r}, {str(tmp_path / "script.py")!r}, {str(tmp_path)!r}])
"""
    with subprocess.Popen([sys.executable, "-c", patched], stdout=subprocess.DEVNULL) as launcher:
        files = [tmp_path / name for name in ("group 0", "group 1", "syncer started 1")]
        deadline = time.monotonic() + LIMIT_S
        while not all(map(Path.exists, files)) and time.monotonic() < deadline:
            time.sleep(0.01)
        launcher.kill()
    pids = [int(path.read_text()) for path in files]
    while any(map(is_there, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.rest
def test_syncer_is_a_parameter_server_that_comes_back_at_its_address(tmp_path, monkeypatch, capfd):
    made = []

    def noted(*arguments, **more):
        made.append(Process(*arguments, **more))
        return made[-1]

    def kill_the_first():
        listening = []
        deadline = time.monotonic() + LIMIT_S
        while len(listening) < 2 and time.monotonic() < deadline:
            listening = [each for each in made if any("listens at" in line for line in each.lines)]
            if len(listening) == 1:
                listening[0].kill()
            time.sleep(0.05)
        (tmp_path / "enough").touch()

    monkeypatch.setattr(supervisor, "Process", noted)
    (tmp_path / "script.py").write_text(TASK + 'wait_for("enough")')
    threading.Thread(target=kill_the_first, daemon=True).start()
    options = ["--groups", "1", "--plain", "--checkpoint-dir", str(tmp_path / "saved")]
    code = main(["launch", *options, str(tmp_path / "script.py"), str(tmp_path)])
    out, err = capfd.readouterr()
    assert code == 0, err
    addresses = re.findall(r"syncer 0 \| ps 0 listens at (\S+)", out)
    assert len(addresses) == 2
    assert len(set(addresses)) == 1
    assert "syncer 0: ps 0 was killed by SIGKILL. Starting it again: restart 1 of 3." in err

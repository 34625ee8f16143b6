"""The status that a task gives the launcher, in a file that the script may also write."""

import json

from replicax._launch.task_progress import read_status
from replicax._src.cluster.status_file import StatusFile


def test_launcher_reads_the_status_file(tmp_path):
    path = tmp_path / "worker-0.json"
    file = StatusFile(str(path))
    for step, state in ((0, "starting"), (7, "running")):
        file.write(step, state)
        status = read_status(path)
        assert (status.step, status.state) == (step, state)
    assert list(tmp_path.iterdir()) == [path]


def test_launcher_reads_whether_the_task_tolerates_failures(tmp_path):
    path = tmp_path / "worker-0.json"
    file = StatusFile(str(path))
    file.write(1, "running")
    assert read_status(path).tolerates_failures is False
    file.write(1, "running", tolerates_failures=True)
    assert read_status(path).tolerates_failures is True
    for said in ("yes", 1, None):  # by a script
        path.write_text(json.dumps({"step": 3, "time": 5.0, "tolerates_failures": said}))
        assert read_status(path).tolerates_failures is None


def test_status_of_the_script_stays(tmp_path):
    path = tmp_path / "worker-0.json"
    file = StatusFile(str(path))
    file.write(1, "running")
    path.write_text(json.dumps({"step": 3, "time": 5.0, "state": "training"}))
    file.write(2, "running")
    assert read_status(path).state == "training"
    assert not file.is_wanted


def test_status_is_not_requested_or_not_writable(tmp_path):
    StatusFile(None).write(1, "running")
    file = StatusFile(str(tmp_path / "no" / "folder"))
    file.write(1, "running")
    assert not file.is_wanted

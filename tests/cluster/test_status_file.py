"""What a task tells the launcher, in a file that may be the script's own."""

import json

from replicax._src.cli.status import read_status
from replicax._src.cluster.status_file import StatusFile


def test_the_launcher_reads_what_is_written(tmp_path):
    path = tmp_path / "worker-0.json"
    file = StatusFile(str(path))
    for step, state in ((0, "starting"), (7, "running")):
        file.write(step, state)
        status = read_status(path)
        assert (status.step, status.state) == (step, state)
    assert list(tmp_path.iterdir()) == [path]


def test_what_the_script_writes_stays(tmp_path):
    path = tmp_path / "worker-0.json"
    file = StatusFile(str(path))
    file.write(1, "running")
    path.write_text(json.dumps({"step": 3, "time": 5.0, "state": "training"}))
    file.write(2, "running")
    assert read_status(path).state == "training"
    assert not file.is_wanted


def test_nobody_asks_for_it_or_it_cannot_be_written(tmp_path):
    StatusFile(None).write(1, "running")
    file = StatusFile(str(tmp_path / "no" / "folder"))
    file.write(1, "running")
    assert not file.is_wanted

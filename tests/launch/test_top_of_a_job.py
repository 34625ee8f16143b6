"""``replicax top`` shows the job, its progress and its metrics."""

from replicax._launch.top import lines_of, summary_lines
from replicax._src.status.job import status_of
from replicax._src.status.status import with_rates


def status(name="train.py"):
    task = {
        "task": "worker {}",
        "state": "running",
        "pid": 7,
        "uptime_s": 3.0,
        "steps": 4,
        "host": name,
        "function": name,
    }
    progress = {"kind": "epoch", "number": 3, "num_turns": 6, "batch": 120, "num_batches": 1313}
    return {
        **with_rates(None, status_of([{**task, "task": f"worker {number}"} for number in range(2)], 10.0)),
        "job": {"name": name, "strategy": "MirroredStrategy"},
        "progress": {**progress, "share": 0.3972, "left_s": 125.0},
        "metrics": {name: 0.25},
    }


def test_job_is_titled_and_its_progress_is_shown():
    assert summary_lines(status())[:2] == [
        "train.py  MirroredStrategy, 2 tasks",
        "epoch 3 of 6  batch 120 of 1,313  done 40 %  time left 2 min 5 s",
    ]


def test_names_of_others_are_text_on_terminals():
    text = "\n".join(lines_of(status("<script>\x1b[2J\u202e")))
    assert "<script>\\x1b[2J\\u202e" in text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_survivors_have_a_line():
    counts = {"num_recoveries": 1, "num_replacements": 0, "recovery_s": 0.0512}
    survivors = {"epoch": 2, "members": [0], "adopted": {"1": 0}, **counts}
    line = (
        "live workers 1 of 2  adopted replica 1 by worker 0  recoveries 1  replacements 0  last recovery 0.05 s  "
        "epoch of members 2"
    )
    assert line in summary_lines({**status(), "survivors": survivors})
    assert not [each for each in summary_lines(status()) if "live workers" in each]

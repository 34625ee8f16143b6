"""The status of a synchronous job: who is slow, its table and metrics, and who serves it."""

import itertools
import json
import re
import socket

import pytest

from replicax._src.cli.top import lines_of, summary_lines
from replicax._src.status import job
from replicax._src.status.figures import FIGURES
from replicax._src.status.job import status_of
from replicax._src.status.metrics import metrics_of
from replicax._src.status.page import page_of
from replicax._src.status.status import (
    columns_of,
    curve_values_of,
    fit_metrics_of,
    meanings_of,
    progress_of,
    rows_of,
    summary_of,
    title_of,
    with_rates,
)


def task(number, now, own_share, *, state="running", **more):
    """A task that takes two steps of eight rows a second."""
    figures = {
        "pid": 100 + number,
        "uptime_s": now,
        "resident_bytes": 1 << 30,
        "host": "node",
        "restarts": 1,
        "cpu_s": now / 2,
        "steps": int(2 * now),
        "examples": int(16 * now),
        "loss": 0.25,
        "data_s": now * own_share / 2,
        "device_s": now * (1 - own_share),
    }
    return {"task": f"worker {number}", "state": state, **figures, **more}


def status(*own_shares, **more):
    """A status with rates of 5 s."""
    before, after = (
        status_of([task(number, now, share, **more) for number, share in enumerate(own_shares)], now)
        for now in (10.0, 15.0)
    )
    return with_rates(before, after)


def states(told):
    return [each["state"] for each in told["tasks"]]


@pytest.mark.parametrize(
    ("own_shares", "slow"),
    [
        ([0.1, 0.9], "worker 1"),
        ([0.3, 0.1, 0.15], "worker 0"),
        ([0.12, 0.1, 0.08], "–"),  # they differ by less than 10 % of the time
        ([0.9], "–"),  # nobody waits for it
        ([0.9, 0.9, 0.9], "–"),
    ],
    ids=str,
)
def test_slow_is_the_task_whose_devices_wait_for_it_most(own_shares, slow):
    told = status(*own_shares)
    assert dict(summary_of(told))["slow"] == slow
    assert [each["task"] for each in told["tasks"] if each["is_slow"]] == [slow] * (slow != "–")
    assert states(told).count("slow") == (slow != "–")


def test_task_that_is_gone_is_not_slow_and_shows_no_old_values():
    gone = {"task": "worker 1", "state": "lost"}
    told = with_rates(None, status_of([task(0, 10.0, 0.1), gone], 10.0))
    assert states(told) == ["running", "lost"]
    assert {told["tasks"][1][name] for name in FIGURES if name in told["tasks"][1]} == {None}
    assert 'replicax_task_up{task="worker 1"} 0' in metrics_of(told)
    assert len(rows_of(told)) == 2


def test_table_has_the_columns_that_are_known():
    told = status(0.2, 0.6)
    names = [column.name for column in columns_of(told)]
    assert dict(zip(names, rows_of(told)[1], strict=True)) == {
        "task": "worker 1",
        "state": "slow",
        "host": "node",
        "step": "30",
        "steps/s": "2.0",
        "examples/s": "16.0",
        "loss": "0.25",
        "data": "30 %",
        "own": "60 %",
        "cpu": "50 %",
        "memory": "1.0 GB",
        "restarts": "1",
        "pid": "101",
        "up": "15 s",
    }
    with_devices = status(0.2, 0.6, device_bytes=5 << 20, function="step")
    assert {column.name for column in columns_of(with_devices)} - set(names) == {"device memory", "function"}
    assert dict(summary_of(told)) == {
        "step": "30",
        "steps/s": "2.0",
        "examples/s": "32.0",
        "loss": "0.25",
        "slow": "worker 1",
    }


def test_status_is_json_and_the_page_has_no_staleness():
    told = status(0.2, 0.6, loss="nan")
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    page = page_of(told)
    assert "Staleness" not in page
    assert "<td class=bad>slow</td>" in page
    lines = metrics_of(told).splitlines()
    assert 'replicax_loss{task="worker 0"} nan' in lines
    assert 'replicax_steps_total{task="worker 1"} 30' in lines
    assert 'replicax_steps_per_second{task="worker 1"} 2.0' in lines
    assert 'replicax_task_slow{task="worker 1"} 1' in lines
    assert 'replicax_task_slow{task="worker 0"} 0' in lines
    assert not [line for line in lines if "closures" in line]


OF_JOB = {
    "job": {"name": "train.py", "strategy": "MirroredStrategy"},
    "progress": {
        **{"kind": "epoch", "number": 3, "num_turns": 6, "batch": 120, "num_batches": 1313},
        **{"share": 0.3972, "left_s": 125.0},
    },
    "metrics": {"mae": 0.25, 'val "loss"': "nan"},
}


def test_job_is_titled_and_its_progress_and_metrics_are_shown():
    told = {**status(0.2, 0.6), **OF_JOB}
    assert title_of(told) == ("train.py", "MirroredStrategy, 2 tasks")
    assert dict(progress_of(told)) == {
        "epoch": "3 of 6",
        "batch": "120 of 1,313",
        "done": "40 %",
        "time left": "2 min 5 s",
    }
    assert fit_metrics_of(told) == [("mae", "0.25"), ('val "loss"', "nan")]
    assert curve_values_of(told) == {"loss": 0.25, "val_loss": None, "steps/s": 2.0}
    assert summary_lines(told)[:2] == [
        "train.py  MirroredStrategy, 2 tasks",
        "epoch 3 of 6  batch 120 of 1,313  done 40 %  time left 2 min 5 s",
    ]
    lines = metrics_of(told).splitlines()
    assert {"replicax_progress_ratio 0.3972", "replicax_time_left_seconds 125.0"} <= set(lines)
    assert 'replicax_fit_metric{name="val \\"loss\\""} nan' in lines


def test_what_is_not_known_of_a_job_is_not_shown():
    progress = {"kind": "pass", "number": 1, "num_turns": None, "batch": 7, "num_batches": None}
    told = {
        **status(0.2, 0.6),
        **OF_JOB,
        "progress": {**progress, "share": None, "left_s": None},
        "metrics": {},
    }
    assert progress_of(told) == [("pass", "1"), ("batch", "7")]
    assert "<progress" not in page_of(told)
    told["progress"] |= {"num_batches": 10, "share": 0.7, "left_s": 3.0}
    assert progress_of(told)[1:] == [("batch", "7 of 10"), ("pass done", "70 %"), ("pass ends in", "3 s")]
    assert "<title>train.py · MirroredStrategy, 2 tasks</title>" in page_of(told), "nobody knows the whole"
    told |= {"job": {"name": None, "strategy": None}, "progress": None}
    assert title_of(told) == ("replicax", "2 tasks")
    assert progress_of(told) == []
    names = re.findall("^# TYPE ([a-z_]+)", metrics_of(told), re.MULTILINE)
    assert not {"replicax_progress_ratio", "replicax_time_left_seconds", "replicax_fit_metric"} & set(names)


def test_meanings_are_those_of_the_columns_that_are_shown():
    names = {column.name for column in columns_of(status(0.2, 0.6))}
    meanings = meanings_of(status(0.2, 0.6))
    assert {"data", "own", "slow", "step"} <= meanings.keys() <= names | {"slow"}
    assert all(text.endswith(".") for text in meanings.values())


def test_names_of_others_are_text_on_the_page_and_on_terminals():
    ugly = "<script>\x1b[2J\u202e"
    told = status(0.2, 0.6, function=ugly, host=ugly)
    told |= {"job": {"name": ugly, "strategy": ugly}, "metrics": {ugly: 1.0}}
    told["progress"] = {**OF_JOB["progress"], "kind": ugly}
    page = page_of(told)
    assert page.count("<script>") == 1, "its own"
    assert page.count("&lt;script&gt;\\x1b[2J\\u202e") > 6
    for text in (page, *lines_of(told)):
        assert "\x1b" not in text
        assert "\u202e" not in text


def test_figures_that_were_not_known_count_from_zero():
    before = status_of([task(0, 10.0, 0.1, examples=None, device_s=None)], 10.0)
    told = with_rates(before, status_of([task(0, 15.0, 0.1, examples=80, device_s=4.0)], 15.0))["tasks"][0]
    assert (told["examples_per_s"], told["own_share"]) == (16.0, pytest.approx(0.2))


def test_restarted_task_has_no_rates():
    before = status_of([task(0, 10.0, 0.1)], 10.0)
    after = status_of([task(0, 12.0, 0.1, pid=7)], 12.0)
    assert with_rates(before, after)["tasks"][0]["steps_per_s"] is None


# --- who serves it --------------------------------------------------------------------------------------


@pytest.fixture
def serving(monkeypatch):
    """Calls ``serve_status`` in an environment. Returns the server; None if there is none."""
    servers = []
    monkeypatch.setattr(job, "_servers", servers)
    monkeypatch.setattr(job.atexit, "register", lambda function: function)

    def serve(**environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        job.serve_status()
        return next(iter(servers), None)

    yield serve
    for server in servers:
        server.close()


def cluster(task_type, *jobs):
    numbers = itertools.count(1)
    described = {name: [f"127.0.0.1:{next(numbers)}"] for name in jobs}
    return json.dumps({"cluster": described, "task": {"type": task_type, "index": 0}})


ADDRESS = {"REPLICAX_STATUS_ADDRESS": "127.0.0.1:0"}


def test_a_job_of_one_process_serves_its_status(serving, capsys):
    server = serving(**ADDRESS, REPLICAX_PROGRESS="1")
    assert serving(**ADDRESS) is server
    assert capsys.readouterr().err == (
        f"replicax: Status: http://{server.address}/ and replicax top {server.address}\n"
    )
    told = server.status()
    assert told["tasks"][0]["task"] == "worker 0"
    assert told["tasks"][0]["resident_bytes"] > 1 << 20


@pytest.mark.parametrize(
    ("address", "why"),
    [
        (None, "The port may be in use"),
        ("8080", "it has no port"),
        ("0.0.0.0:0", "REPLICAX_TOKEN"),
    ],
    ids=["used", "malformed", "no token"],
)
def test_an_impossible_address_is_no_error_of_the_job(serving, monkeypatch, caplog, address, why):
    monkeypatch.delenv("REPLICAX_TOKEN", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as used:
        address = address or f"127.0.0.1:{used.getsockname()[1]}"
        assert serving(REPLICAX_STATUS_ADDRESS=address) is None
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith("This job has no status, because of REPLICAX_STATUS_ADDRESS: ")
    assert why in record.getMessage()


@pytest.mark.parametrize(
    ("environment", "is_served"),
    [
        ({}, False),
        ({**ADDRESS, "TF_CONFIG": cluster("worker", "chief", "worker")}, False),
        ({**ADDRESS, "TF_CONFIG": cluster("chief", "chief", "worker")}, True),
        (
            {**ADDRESS, "TF_CONFIG": cluster("chief", "chief", "worker", "ps")},
            False,
        ),  # its coordinator serves
    ],
    ids=["no address", "worker", "chief", "coordinator"],
)
def test_only_the_chief_serves(serving, monkeypatch, environment, is_served):
    monkeypatch.setattr("replicax._src.cluster.chief._roles", [])
    monkeypatch.delenv("REPLICAX_STATUS_ADDRESS", raising=False)
    assert (serving(**environment) is not None) == is_served

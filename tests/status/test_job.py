"""The status of a synchronous job: who is slow, its table and metrics, and who serves it."""

import itertools
import json
import re
import socket
import threading
import time
import types

import pytest

from replicax._src.cluster.counters import counters
from replicax._src.cluster.figures import FIGURES, job_figures
from replicax._src.status import job
from replicax._src.status.http_server import StatusServer
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
    survivors_of,
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
    lines = metrics_of(told).splitlines()
    assert {"replicax_progress_ratio 0.3972", "replicax_time_left_seconds 125.0"} <= set(lines)
    assert 'replicax_fit_metric{name="val \\"loss\\""} nan' in lines


SURVIVORS = {
    "epoch": 3,
    "members": [0, 2],
    "adopted": {"1": 2},
    "num_recoveries": 1,
    "num_replacements": 2,
    "recovery_s": 0.0512,
}


def test_survivors_are_shown():
    told = {**status(0.2, 0.1, 0.6), "survivors": SURVIVORS}
    assert dict(survivors_of(told)) == {
        "live workers": "2 of 3",
        "adopted": "replica 1 by worker 2",
        "recoveries": "1",
        "replacements": "2",
        "last recovery": "0.05 s",
        "epoch of members": "3",
    }
    assert "<h2>Fault tolerance</h2>" in page_of(told)
    assert meanings_of(told).keys() >= {
        "adopted",
        "recoveries",
        "replacements",
        "last recovery",
        "epoch of members",
    }
    assert set(metrics_of(told).splitlines()) >= {
        "replicax_live_workers 2",
        "replicax_adopted_replicas 1",
        "replicax_recoveries_total 1",
        "replicax_replacements_total 2",
        "replicax_last_recovery_seconds 0.0512",
        "replicax_members_epoch 3",
    }


def test_before_the_first_death_nothing_is_adopted():
    told = {
        **status(0.2, 0.1),
        "survivors": {**SURVIVORS, "members": [0, 1], "adopted": {}, "recovery_s": None},
    }
    shown = dict(survivors_of(told))
    assert (shown["live workers"], shown["adopted"], shown["last recovery"]) == ("2 of 2", "–", "–")
    assert "replicax_adopted_replicas 0" in metrics_of(told)
    assert "last_recovery" not in metrics_of(told)


def test_without_fault_tolerance_nothing_is_said_of_survivors():
    told = status(0.2, 0.1)
    assert survivors_of(told) == []
    assert "Fault tolerance" not in page_of(told)
    assert "replicax_live_workers" not in metrics_of(told)
    assert "adopted" not in meanings_of(told)


def test_figures_of_the_job_describe_the_survivors(monkeypatch):
    assert "survivors" not in job_figures()
    monkeypatch.setattr(counters, "survivors", lambda: SURVIVORS)
    assert job_figures()["survivors"] == SURVIVORS


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


def test_names_of_others_are_text_on_the_page():
    ugly = "<script>\x1b[2J\u202e"
    told = status(0.2, 0.6, function=ugly, host=ugly)
    told |= {"job": {"name": ugly, "strategy": ugly}, "metrics": {ugly: 1.0}}
    told["progress"] = {**OF_JOB["progress"], "kind": ugly}
    page = page_of(told)
    assert page.count("<script>") == 1, "its own"
    assert page.count("&lt;script&gt;\\x1b[2J\\u202e") > 6
    assert "\x1b" not in page
    assert "\u202e" not in page


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


def test_next_chief_serves_as_soon_as_the_address_is_free(serving, monkeypatch):
    """Processes that the chief before has started may hold it for a moment."""
    with socket.create_server(("127.0.0.1", 0)) as held:
        address = f"127.0.0.1:{held.getsockname()[1]}"
        monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", address)
        job.take_status_over()
        time.sleep(0.3)
        assert not job._servers
    deadline = time.monotonic() + 10
    while not job._servers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [server.address for server in job._servers] == [address]
    job.take_status_over()  # it serves already
    assert len(job._servers) == 1


def test_chief_that_has_come_later_waits_for_the_end_of_the_process_that_serves(serving, monkeypatch, caplog):
    monkeypatch.setattr(job, "_TAKE_OVER_S", 0.1)
    other = StatusServer("127.0.0.1:0", None, job.status_of_job)
    other.start()
    monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", other.address)
    for _ in range(2):
        job.take_status_over()
    time.sleep(0.8)
    assert sum(thread.name == job._WAITING for thread in threading.enumerate()) == 1
    assert not job._servers
    other.close()
    deadline = time.monotonic() + 10
    while not job._servers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [server.address for server in job._servers] == [other.address]
    assert not caplog.records


def test_chief_that_gives_the_role_back_frees_the_address_for_the_next_one(serving, monkeypatch):
    """A replacement of worker 0 becomes the chief again."""
    forgotten = threading.Event()
    monkeypatch.setattr(job, "joined_peers", lambda: types.SimpleNamespace(forget_figures=forgotten.set))
    server = StatusServer("127.0.0.1:0", None, lambda: {})
    job._servers.append(server)
    job.hand_status_over()
    assert not job._servers
    assert forgotten.wait(10)
    StatusServer(server.address, None, lambda: {}).close()
    job.hand_status_over()  # it serves no more


def test_next_chief_that_cannot_serve_at_the_address_only_warns(serving, monkeypatch, caplog):
    """It may be on another machine."""
    monkeypatch.setattr(job, "_TAKE_OVER_S", 0.0)
    monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", "192.0.2.1:8080")
    monkeypatch.setenv("REPLICAX_TOKEN", "token")
    job.take_status_over()
    deadline = time.monotonic() + 10
    while not caplog.records and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "This job has no status, because of REPLICAX_STATUS_ADDRESS: " in caplog.records[0].getMessage()


def test_without_an_address_the_next_chief_serves_nothing(serving, monkeypatch):
    monkeypatch.delenv("REPLICAX_STATUS_ADDRESS", raising=False)
    before = set(threading.enumerate())  # some of earlier tests may be ending
    job.take_status_over()
    assert set(threading.enumerate()) <= before

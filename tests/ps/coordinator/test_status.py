"""The status of a cluster: from counters to JSON, rates, a table, and metrics for Prometheus."""

import json
import math
import re

import pytest

from replicax._ps.coordinator.statistics import status_of
from replicax._src.status.metrics import metrics_of
from replicax._src.status.page import page_of
from replicax._src.status.status import (
    Recent,
    columns_of,
    rows_of,
    summary_of,
    with_rates,
)

CLOSURES = {
    "scheduled": 20,
    "finished": 12,
    "failed": 1,
    "cancelled": 2,
    "retried": 3,
    "rounds": 0,
    "gradients_dropped": 0,
    "queued": 4,
    "in_flight": 1,
    "low": 9,
}


def process(pid, uptime_s, bytes_in=0, bytes_out=0):
    transport = {"bytes_in": bytes_in, "bytes_out": bytes_out, "messages": 1}
    return {"pid": pid, "uptime_s": uptime_s, "resident_bytes": 1 << 20, "transport": transport}


def worker(**more):
    return {
        "connected": True,
        "given_up": False,
        "connections": 1,
        "restarts": 0,
        "function": "step",
        "in_flight": 1,
        "statistics": {
            "num_closures": 7,
            "traffic": {"bytes_in": 100, "bytes_out": 10},
            "process": process(11, 30.0, 1000, 2000),
        },
        **more,
    }


def ps(staleness=None, pid=21, uptime_s=30.0, updates=0, **more):
    staleness = staleness or {"num": 0, "mean": 0.0, "max": 0, "histogram": {}}
    own = {"updates": updates, "duplicates": 0, "bytes": 64, "staleness": staleness}
    return {
        "connected": True,
        "restarts": 0,
        "statistics": {**own, "process": process(pid, uptime_s, 500, 600)},
        **more,
    }


def status(workers=(), servers=(), uptime_s=40.0, replication=None, loss=None, **closures):
    statistics = {
        "closures": {**CLOSURES, **closures},
        "workers": {f"worker {n}": told for n, told in enumerate(workers)},
        "ps": {f"ps {n}": told for n, told in enumerate(servers)},
        "replication": replication,
    }
    figures = {"pid": 1, "uptime_s": uptime_s, "resident_bytes": 1 << 30, "loss": loss, "data_s": 0.0}
    return status_of(statistics, figures, 1000.0)


def task(status, name):
    (found,) = [task for task in status["tasks"] if task["task"] == name]
    return found


# --- from counters to a status ---------------------------------------------------------------------------


def test_all_tasks_have_the_same_fields_and_all_is_json():
    told = status([worker()], [ps()])
    assert [each["task"] for each in told["tasks"]] == ["coordinator", "worker 0", "ps 0"]
    assert len({tuple(each) for each in told["tasks"]}) == 1
    assert json.loads(json.dumps(told)) == told
    assert told["closures"]["queued"] == 4
    assert "low" not in told["closures"]


def test_rounds_are_shown_where_there_are_some():
    without, told = status(), status(rounds=1200, gradients_dropped=3)
    assert dict(summary_of(with_rates(None, told)))["rounds"] == "1,200"
    assert dict(summary_of(with_rates(None, told)))["gradients dropped"] == "3"
    assert "rounds" not in dict(summary_of(with_rates(None, without)))
    assert "<dt>gradients dropped</dt><dd>3</dd>" in page_of(with_rates(None, told))
    lines = metrics_of(told).splitlines()
    assert "replicax_rounds_total 1200" in lines
    assert "replicax_gradients_dropped_total 3" in lines


def test_bytes_of_a_worker_include_coordinator_and_parameter_servers():
    told = status([worker()], [ps()])
    assert (task(told, "worker 0")["received_bytes"], task(told, "worker 0")["sent_bytes"]) == (1100, 2010)
    assert (task(told, "ps 0")["received_bytes"], task(told, "ps 0")["sent_bytes"]) == (500, 600)


def test_workers_that_read_datasets_have_examples_and_waits_and_the_coordinator_has_the_loss():
    def reading(now):
        own = {"examples": int(64 * now), "data_s": now / 4, "process": process(11, now)}
        return status([worker(statistics=own), worker()], [ps()], uptime_s=now, loss=0.5)

    told = with_rates(reading(10.0), reading(14.0))
    names = [column.name for column in columns_of(told)]
    shown = [dict(zip(names, row, strict=True)) for row in rows_of(told)]
    assert [(row["examples/s"], row["loss"], row["data"]) for row in shown] == [
        ("–", "0.5", "–"),
        ("64.0", "–", "25 %"),
        ("–", "–", "–"),  # its functions read no dataset
        ("–", "–", "–"),
    ]
    lines = metrics_of(told).splitlines()
    assert 'replicax_examples_total{task="worker 0"} 896' in lines
    assert 'replicax_data_wait_seconds_total{task="worker 0"} 3.5' in lines
    assert 'replicax_loss{task="coordinator"} 0.5' in lines


@pytest.mark.parametrize(
    ("state", "told"),
    [
        ("busy", worker()),
        ("idle", worker(in_flight=0, function=None)),
        ("awaited", worker(connected=False, connections=0, statistics={})),
        ("lost", worker(connected=False)),
        ("given up", worker(connected=False, given_up=True)),
    ],
)
def test_states_of_a_worker(state, told):
    assert task(status([told]), "worker 0")["state"] == state


@pytest.mark.parametrize(
    ("state", "told"), [("serving", ps()), ("lost", ps(connected=False)), ("awaited", ps(statistics={}))]
)
def test_states_of_a_parameter_server(state, told):
    assert task(status([], [told]), "ps 0")["state"] == state


def test_servers_without_a_copy_and_servers_with_copies_only():
    replication = {"primaries": [1, 1, 2], "unprotected": [0], "lost": []}
    told = status([], [ps(), ps(), ps()], replication=replication)
    states = [task(told, f"ps {n}")["state"] for n in range(3)]
    assert states == ["backup", "alone", "serving"]
    assert 'replicax_task_up{task="ps 0"} 1' in metrics_of(told)
    assert "backup" in page_of(with_rates(None, told))


def test_lost_task_shows_no_old_values():
    told = status([worker(connected=False)], [ps(connected=False)])
    for name in ("worker 0", "ps 0"):
        lost = task(told, name)
        assert {
            lost[what] for what in ("pid", "resident_bytes", "received_bytes", "closures", "updates")
        } == {None}


def test_task_without_process_data_is_shown():
    told = status([worker(statistics={})], [ps(statistics={"updates": 1})])
    assert len(rows_of(with_rates(None, told))) == 3
    assert metrics_of(told)


def test_staleness_is_that_of_all_parameter_servers():
    one = {"num": 3, "mean": 1.0, "max": 2, "histogram": {"0": 1, "1": 1, "2": 1}}
    other = {"num": 1, "mean": 9.0, "max": 9, "histogram": {"8": 1}}
    assert status([], [ps(one), ps(other)])["staleness"] == {
        "num": 4,
        "mean": 3.0,
        "max": 9,
        "histogram": {"0": 1, "1": 1, "2": 1, "8": 1},
    }
    assert status([], [ps()])["staleness"] == {"num": 0, "mean": None, "max": None, "histogram": {}}


# --- rates ------------------------------------------------------------------------------------------------


def test_rates_use_the_clock_of_the_counting_task():
    before = status([], [ps(updates=10, uptime_s=30.0)], uptime_s=40.0, finished=100)
    after = with_rates(before, status([], [ps(updates=30, uptime_s=34.0)], uptime_s=42.0, finished=110))
    assert after["closures"]["finished_per_s"] == 5.0
    assert task(after, "ps 0")["updates_per_s"] == 5.0
    assert task(after, "ps 0")["received_bytes_per_s"] == 0.0
    assert task(after, "ps 0")["closures_per_s"] is None


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (ps(updates=10), ps(updates=10)),  # no heartbeat since
        (ps(updates=10, pid=21), ps(updates=30, pid=22, uptime_s=40.0)),  # another process
        (ps(updates=30), ps(updates=10, uptime_s=40.0)),  # counts anew, for another coordinator
        (ps(updates=10), ps(updates=30, uptime_s=40.0, connected=False)),
    ],
)
def test_unknown_rates_are_none(before, after):
    assert task(with_rates(status([], [before]), status([], [after])), "ps 0")["updates_per_s"] is None
    assert task(with_rates(None, status([], [after])), "ps 0")["updates_per_s"] is None


def test_staleness_lately_is_that_of_the_updates_since():
    old = {"num": 10, "mean": 1.0, "max": 2, "histogram": {"1": 10}}
    new = {"num": 14, "mean": 3.0, "max": 20, "histogram": {"1": 10, "8": 4}}
    after = with_rates(status([], [ps(old)]), status([], [ps(new)]))
    assert after["staleness"]["recent_mean"] == (14 * 3.0 - 10 * 1.0) / 4
    assert with_rates(after, status([], [ps(new)]))["staleness"]["recent_mean"] is None


def test_recent_is_the_last_seconds_only():
    recent = Recent()
    assert recent.with_rates(status())["closures"]["finished_per_s"] is None
    for second in range(20):  # 1/s first, then 100/s
        finished = second if second < 10 else 10 + 100 * (second - 10)
        recent.add(status(uptime_s=float(second), finished=finished))
    told = recent.with_rates(status(uptime_s=20.0, finished=1010))
    assert told["closures"]["finished_per_s"] == 100.0


# --- for people -------------------------------------------------------------------------------------------


def test_rows_have_a_cell_for_each_column():
    before, after = status([worker()], [ps()]), status([worker()], [ps(updates=50, uptime_s=40.0)])
    rows = rows_of(with_rates(before, after))
    names = [column.name for column in columns_of(with_rates(before, after))]
    assert {len(row) for row in rows} == {len(names)}
    assert dict(zip(names, rows[2], strict=True)) == {
        "task": "ps 0",
        "state": "serving",
        "function": "–",
        "closures/s": "–",
        "updates/s": "5.0",
        "received/s": "0 B",
        "sent/s": "0 B",
        "memory": "1.0 MB",
        "restarts": "0",
        "pid": "21",
        "up": "40 s",
    }


def test_the_page_escapes_names():
    page = page_of(with_rates(None, status([worker(function='<script>"&')])), '?token="><b>')
    assert "<script>&quot;" not in page
    assert page.count("&lt;script&gt;&quot;&amp;") == 2
    assert "<b>" not in page
    assert page.count("<script>") == 1


# --- metrics ----------------------------------------------------------------------------------------------

SAMPLE = re.compile(r'([a-z_]+)(?:\{((?:[a-z_]+="(?:[^"\\\n]|\\["\\n])*",?)*)\})? (\S+)')
LABEL = re.compile(r'([a-z_]+)="((?:[^"\\]|\\.)*)"')


def parsed(text):
    """The metrics as Prometheus reads them: the type of each metric, and its samples by name and labels. The parser is
    strict."""
    assert text.endswith("\n")
    types, helps, samples, current = {}, set(), {}, None
    for line in text.splitlines():
        if line.startswith("# "):
            _, what, name, rest = line.split(" ", 3)
            assert what in ("HELP", "TYPE"), line
            if what == "HELP":
                assert name not in helps, f"{name} comes twice"
                helps.add(name)
            else:
                assert name in helps, line
                assert name not in types, line
                assert rest in ("counter", "gauge", "histogram"), line
                types[name] = rest
                current = name
            continue
        match = SAMPLE.fullmatch(line)
        assert match, line
        name, labels, value = match.groups()
        suffixes = ("_bucket", "_sum", "_count") if types[current] == "histogram" else ("",)
        assert name in {current + suffix for suffix in suffixes}, f"{name} stands under {current}"
        assert (types[current] == "counter") == name.endswith("_total"), name
        key = (name, tuple(sorted(LABEL.findall(labels or ""))))
        assert key not in samples, f"{key} comes twice"
        samples[key] = float(value)
    return types, samples


def test_metrics_match_the_status():
    types, samples = parsed(metrics_of(status([worker()], [ps(updates=8), ps(connected=False)])))
    assert types["replicax_closures_finished_total"] == "counter"
    assert samples["replicax_closures_finished_total", ()] == 12
    assert samples["replicax_closures_queued", ()] == 4
    of = {task: (("task", task),) for task in ("coordinator", "worker 0", "ps 0", "ps 1")}
    assert [samples["replicax_task_up", of[task]] for task in of] == [1, 1, 1, 0]
    assert samples["replicax_ps_updates_total", of["ps 0"]] == 8
    assert samples["replicax_task_received_bytes_total", of["worker 0"]] == 1100
    assert samples["replicax_task_resident_memory_bytes", of["coordinator"]] == 1 << 30
    assert ("replicax_ps_updates_total", of["ps 1"]) not in samples
    assert ("replicax_ps_updates_total", of["worker 0"]) not in samples


def test_metrics_of_staleness_are_a_histogram():
    staleness = {"num": 9, "mean": 400.0, "max": 3000, "histogram": {"0": 3, "2": 4, "4": 1, "2048": 1}}
    types, samples = parsed(metrics_of(status([], [ps(staleness)])))
    name = "replicax_ps_staleness_updates"
    assert types[name] == "histogram"
    below = {
        dict(labels)["le"]: value for (which, labels), value in samples.items() if which == f"{name}_bucket"
    }
    assert {le: below[le] for le in ("0", "1", "3", "7", "1023", "+Inf")} == {
        "0": 3,
        "1": 3,
        "3": 7,
        "7": 8,
        "1023": 8,
        "+Inf": 9,
    }
    limits = [math.inf if le == "+Inf" else float(le) for le in below]
    assert limits == sorted(limits)
    assert samples[f"{name}_count", (("task", "ps 0"),)] == 9
    assert samples[f"{name}_sum", (("task", "ps 0"),)] == 3600


def test_metrics_escape_labels():
    told = status([worker()])
    told["tasks"][1]["task"] = 'a"b\\c\nd'
    _, samples = parsed(metrics_of(told))
    assert ("replicax_task_up", (("task", 'a\\"b\\\\c\\nd'),)) in samples

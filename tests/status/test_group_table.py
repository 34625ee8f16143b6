"""The groups that train alone, in a status: in ``replicax top``, on the page, and in the metrics."""

from replicax._src.cluster.counters import counters
from replicax._src.cluster.figures import job_figures
from replicax._src.status.group_table import group_lines_of, group_rows_of, groups_of
from replicax._src.status.job import status_of
from replicax._src.status.metrics import metrics_of
from replicax._src.status.page import page_of
from replicax._src.status.status import meanings_of, with_rates
from replicax._src.status.summary_lines import summary_lines

GROUPS = {
    "index": 0,
    "quorum": 3,
    "versions": [41, 40],
    "is_stopping": False,
    "rows": 12345,
    "pushes": 41,
    "adoptions": 40,
    "lost_pushes": 1,
    "silent_servers": 0,
    "sent_bytes": 18 << 20,
    "received_bytes": 22 << 20,
    "members": [
        {"state": "training", "lag": 0, "rows": 1960},
        {"state": "silent", "lag": 3, "rows": 0},
        {"state": "awaited", "lag": None, "rows": 0},
    ],
}
TASK = {"task": "worker 0", "state": "running", "steps": 5, "uptime_s": 5.0}


def status(**more):
    return {**with_rates(None, status_of([TASK], 5.0)), **more}


def test_groups_are_the_last_lines_of_the_summary():
    assert summary_lines(status(groups=GROUPS))[-5:] == [
        "group 0 of 3  version 40 to 41  quorum 3  rows 12,345  pushes 41  adoptions 40  lost pushes 1  silent servers 0  "
        "sent 18 MB  received 22 MB",
        "group  exchange  lag  open rows",
        "0      training    0      1,960",
        "1      silent      3          0",
        "2      awaited     –          0",
    ]
    stopping = dict(groups_of(status(groups={**GROUPS, "versions": [41, 41], "is_stopping": True})))
    assert (stopping["version"], stopping["stopping"]) == ("41", "yes")


def test_before_a_server_has_answered_nothing_is_known_of_the_others():
    told = status(groups={**GROUPS, "versions": [], "members": []})
    assert group_rows_of(told) == []
    assert dict(groups_of(told))["version"] == "–"
    assert group_lines_of(told) == []
    assert "replicax_groups_version" not in metrics_of(told)
    assert "<h2>Groups</h2>" in page_of(told)


def test_page_and_metrics_have_the_groups():
    told = status(groups=GROUPS)
    page, metrics = page_of(told), metrics_of(told).splitlines()
    assert "<td>silent</td><td class=number>3</td>" in page
    assert meanings_of(told).keys() >= {"version", "quorum", "lag", "open rows"}
    assert {
        "replicax_groups_version 40",
        "replicax_groups_quorum 3",
        "replicax_group_rows_total 12345",
        f"replicax_group_sent_bytes_total {18 << 20}",
        'replicax_group_lag{group="1"} 3',
    } <= set(metrics)
    assert not any(line.startswith('replicax_group_lag{group="2"}') for line in metrics)


def test_without_groups_nothing_is_said_of_them():
    told = status()
    assert groups_of(told) == group_lines_of(told) == []
    assert "<h2>Groups</h2>" not in page_of(told)
    assert "replicax_group" not in metrics_of(told)
    assert "lag" not in meanings_of(told)


def test_figures_of_the_job_have_the_groups(monkeypatch):
    assert "groups" not in job_figures()
    monkeypatch.setattr(counters, "groups", lambda: GROUPS)
    assert job_figures()["groups"] == GROUPS

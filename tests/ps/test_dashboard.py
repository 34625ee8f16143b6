"""examples/cluster/grafana.json: every query names metrics that the server has for one kind of job, and labels of theirs."""

import json
import pathlib
import re

import pytest

from checks import closure_statistics
from replicax._ps.coordinator.statistics import status_of as status_of_servers
from replicax._src.cluster.figures import FIGURES
from replicax._src.status.job import status_of
from replicax._src.status.metrics import metrics_of
from replicax._src.status.status import with_rates

DASHBOARD = pathlib.Path(__file__).parents[2] / "examples" / "cluster" / "grafana.json"
PANELS = json.loads(DASHBOARD.read_text())["panels"]
QUERIES = [
    pytest.param(target, id=f"{panel['title']} {target['refId']}")
    for panel in PANELS
    for target in panel["targets"]
]


def of_synchronous_job():
    figures = {**dict.fromkeys(FIGURES, 1), "host": "node"}
    before, after = (
        status_of([{"task": "worker 0", "state": "running", **figures, "uptime_s": now}], now)
        for now in (1.0, 2.0)
    )
    return metrics_of(with_rates(before, after))


def of_parameter_servers():
    transport = {"bytes_in": 1, "bytes_out": 1}
    process = {"pid": 1, "uptime_s": 1.0, "resident_bytes": 1, "transport": transport}
    worker = {"connected": True, "given_up": False, "connections": 1, "restarts": 0, "function": None}
    worker |= {"in_flight": 0, "statistics": {"num_closures": 1, "process": process}}
    staleness = {"num": 1, "mean": 0.0, "max": 0, "histogram": {"0": 1}}
    own = {"updates": 1, "duplicates": 0, "bytes": 1, "staleness": staleness, "process": process}
    ps = {"connected": True, "restarts": 0, "statistics": own}
    statistics = {"closures": closure_statistics(), "workers": {"worker 0": worker}, "ps": {"ps 0": ps}}
    return metrics_of(with_rates(None, status_of_servers(statistics, process, 1.0)))


def labels_of(text):
    """The labels of each metric."""
    found = {}
    for name, labels in re.findall(r"^([a-z_]+)(?:\{(.*)\})? ", text, re.MULTILINE):
        found.setdefault(name, set()).update(re.findall(r'([a-z]+)="', labels))
    return found


SERVED = [labels_of(of_synchronous_job()), labels_of(of_parameter_servers())]


@pytest.mark.parametrize("target", QUERIES)
def test_query_names_metrics_that_are_served(target):
    names = re.findall(r"replicax_\w+", target["expr"])
    assert names
    served = [metrics for metrics in SERVED if set(names) <= set(metrics)]
    assert served, f"no job has {names}"
    wanted = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
    wanted |= {label for by in re.findall(r"by \(([\w, ]+)\)", target["expr"]) for label in by.split(", ")}
    assert all(wanted <= metrics[name] for metrics in served for name in names)


def test_both_kinds_of_jobs_fill_panels():
    queries = " ".join(target["expr"] for panel in PANELS for target in panel["targets"])
    for metrics, others in (SERVED, SERVED[::-1]):
        assert set(re.findall(r"replicax_\w+", queries)) & (set(metrics) - set(others))


def test_counters_are_shown_as_rates_and_panels_do_not_overlap():
    for panel in PANELS:
        for target in panel["targets"]:
            counters = re.findall(r"(\w+\()?(replicax_\w+_total)", target["expr"])
            assert all(call == "rate(" or "restarts" in name for call, name in counters), target["expr"]
    assert len({(p["gridPos"]["x"], p["gridPos"]["y"]) for p in PANELS}) == len(PANELS)
    assert len({p["id"] for p in PANELS}) == len(PANELS)

"""The status page in a browser: its rows, titles, curves and tooltips, in every window, for 2 and 64 tasks."""

import math
import os
import pathlib
import re
import time

import pytest

from checks import closure_statistics
from replicax._ps.coordinator.statistics import status_of as status_of_servers
from replicax._src.status.http_server import StatusServer
from replicax._src.status.job import status_of

ATTACK = "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>"
HOUR = 3600
PICTURES = os.environ.get("REPLICAX_PICTURES")
"""A folder for pictures of the page, for people who look at it."""

pytestmark = pytest.mark.timeout(180)


class Job:
    """A synchronous job, in which worker 1 is slow. It has trained for an hour, with a restart in between."""

    def __init__(self, num_tasks=2, name="train.py"):
        self.num_tasks, self.name, self.num_looks, self.begin = num_tasks, name, 0, time.time()

    def look(self):
        self.num_looks += 1
        uptime_s = 1000.0 + time.time() - self.begin
        tasks = [self.task(number, uptime_s) for number in range(self.num_tasks)]
        progress = {"kind": "epoch", "number": 3, "num_turns": 6, "batch": 120, "num_batches": 313}
        return {
            **status_of(tasks, time.time()),
            "job": {"name": self.name, "strategy": "MultiWorkerMirroredStrategy"},
            "progress": {**progress, "share": 0.3972, "left_s": 125.0},
            "metrics": {"accuracy": 0.912, "val_loss": 1.26, "val_accuracy": 0.88, "learning_rate": 0.001},
        }

    def task(self, number, uptime_s):
        own_share = 0.8 if number == 1 else 0.15
        return {
            **{"task": f"worker {number}", "state": "running", "function": "Sequential.train_step"},
            **{
                "pid": 4000 + number,
                "uptime_s": uptime_s,
                "resident_bytes": 1 << 30,
                "host": f"node-{number // 8}",
            },
            **{"restarts": 1, "cpu_s": uptime_s / 2, "device_bytes": 5 << 30, "loss": 0.8},
            **{"steps": int(50 * uptime_s), "examples": int(1600 * uptime_s)},
            **{"data_s": uptime_s * own_share / 2, "device_s": uptime_s * (1 - own_share)},
        }

    def fill(self, history):
        for second in range(HOUR):
            if 1800 < second < 1900:  # it restarted
                continue
            loss, validation = (100 * math.exp(-at / 700) + 0.8 for at in (second, second // 600 * 600 - 300))
            values = {"loss": loss, "steps/s": 50 + 5 * math.sin(second / 50)}
            history.add(
                self.begin - HOUR + second, {**values, "val_loss": validation if second > 600 else None}
            )


class ServersJob(Job):
    """A job with parameter servers, whose function has an ugly name. Each look has one more finished closure."""

    def look(self):
        self.num_looks += 1
        worker = {"connected": True, "given_up": False, "connections": 1, "restarts": 0, "statistics": {}}
        histogram = {"0": 3, "1": 1}
        staleness = {"num": 4, "mean": 0.25, "max": 1, "histogram": histogram}
        ps = {"connected": False, "restarts": 0, "statistics": {"staleness": staleness}}
        statistics = {
            "closures": closure_statistics(finished=1000 + self.num_looks),
            "workers": {"worker 0": {**worker, "function": ATTACK, "in_flight": 1}},
            "ps": {"ps 0": ps, "ps 1": {**ps, "connected": True}},
        }
        process = {"pid": 1, "uptime_s": 3.0 + self.num_looks, "resident_bytes": 1 << 30}
        return {
            **status_of_servers(statistics, process, time.time()),
            "job": {"name": ATTACK, "strategy": ATTACK},
            "progress": None,
            "metrics": {ATTACK: 1.0, "val_loss": "nan"},
        }


@pytest.fixture
def serve():
    servers = []

    def serve(job):
        server = StatusServer("127.0.0.1:0", None, job.look)
        job.fill(server._history)
        server.start()
        servers.append(server)
        return server.url

    yield serve
    for server in servers:
        server.close()


@pytest.fixture
def picture(browser):
    """Keeps a picture of the page, if somebody wants to look."""

    def keep(name):
        if PICTURES:
            browser.picture(pathlib.Path(PICTURES) / f"{name}.png")

    return keep


WINDOWS = [(360, False), (800, True), (1280, False), (1280, True), (2200, False)]


@pytest.mark.parametrize("num_tasks", [2, 64])
def test_page_shows_the_job(browser, serve, picture, num_tasks):
    job = Job(num_tasks)
    browser.show(serve(job))
    browser.wait_until(
        "document.querySelector('#summary').textContent.includes('worker 1')"
    )  # once it has rates
    title = f"train.py · 40 % · MultiWorkerMirroredStrategy, {num_tasks} tasks"
    assert browser.value("document.title") == title
    assert browser.texts("h1") == [f"train.py MultiWorkerMirroredStrategy, {num_tasks} tasks"]
    assert browser.texts("#progress p") == [
        "epoch 3 of 6 · batch 120 of 313 · done 40 % · time left 2 min 5 s"
    ]
    assert browser.value("document.querySelector('#progress progress').position") == pytest.approx(0.3972)
    assert browser.texts("#summary dt") == ["step", "steps/s", "examples/s", "loss", "slow"]
    assert browser.texts("#summary dd")[-2:] == ["0.8", "worker 1"]
    assert browser.texts("#metrics dt") == ["accuracy", "val_loss", "val_accuracy", "learning_rate"]
    assert browser.texts("#metrics dd") == ["0.912", "1.26", "0.88", "0.001"]
    assert browser.texts("#tasks td:first-child") == [f"worker {number}" for number in range(num_tasks)]
    assert browser.texts("#tasks td:nth-child(2)") == ["running", "slow", *["running"] * (num_tasks - 2)]
    assert len(set(browser.texts("#tasks td:nth-child(5)"))) == 1, "the steps of all tasks"
    for width, is_dark in WINDOWS:
        browser.resize(width, is_dark=is_dark)
        assert browser.value("document.documentElement.scrollWidth") == width, (
            "nothing is wider than the window"
        )
        picture(f"{num_tasks}-tasks-{width}-{'dark' if is_dark else 'light'}")
    assert browser.errors == []


def test_curves_lie_within_their_pictures_and_have_a_gap_at_the_restart(browser, serve):
    browser.show(serve(Job()))
    lines = browser.value(
        """[...document.querySelectorAll("#curves svg")].map(svg => {
          const box = svg.getBoundingClientRect();
          return [...svg.querySelectorAll("polyline")].map(line => {
            const at = line.getBoundingClientRect();
            return {name: line.getAttribute("class"), num: line.points.numberOfItems, left: at.left, right: at.right,
                    isInside: box.left <= at.left && at.right <= box.right && box.top <= at.top && at.bottom <= box.bottom};
          });
        })"""
    )
    losses, speeds = lines
    assert [each["name"] for each in losses] == ["curve loss"] * 2 + ["curve val_loss"] * 2
    assert [each["name"] for each in speeds] == ["curve steps"] * 2
    assert all(each["isInside"] for each in losses + speeds)
    first, second = losses[:2]
    assert first["right"] < second["left"]
    assert 200 < first["num"] + second["num"] <= 320
    assert browser.texts("#curves text:last-of-type") == ["logarithmic", "steps/s"]


def test_curve_grows(browser, serve):
    job = Job()
    job.fill = lambda history: None
    browser.show(serve(job))
    count = "document.querySelector('#curves .loss')?.points.numberOfItems ?? 0"
    browser.wait_until(f"({count}) >= 1")
    before = browser.value(count)
    browser.wait_until(f"({count}) >= {before} + 2")


def test_figures_are_explained_by_a_tooltip_and_a_link(browser, serve):
    browser.show(serve(Job()))
    links = browser.value(
        """[...document.querySelectorAll("#tasks th a, #summary dt a")].map(
          link => [link.textContent, link.title, document.querySelector(link.hash)?.textContent])"""
    )
    assert {"data", "own", "slow", "step", "loss"} <= {name for name, _, _ in links}
    assert all(below == name + title and title for name, title, below in links)
    (own,) = {title for name, title, _ in links if name == "own"}
    assert own.startswith("The share of the last 5 s that the task spent in Python or waiting for its data")
    browser.value("document.querySelector('#tasks th a[href=\"#meaning-own\"]').click()")
    assert browser.value("location.hash") == "#meaning-own"
    browser.wait_until("document.querySelector('#meaning-own').getBoundingClientRect().top < innerHeight")
    before = browser.value("document.querySelector('header p').textContent")
    browser.wait_until(
        f"document.querySelector('header p').textContent !== {before!r}"
    )  # it refreshed itself
    assert browser.errors == []


def test_page_of_64_tasks_has_few_bytes(browser, serve):
    url = serve(Job(64))
    assert browser.value("0") == 0
    browser.show(url)
    num_bytes = browser.value(f"fetch({url!r}).then(answer => answer.blob()).then(blob => blob.size)")
    assert num_bytes < 64_000


def test_page_refreshes_itself_and_executes_no_name(browser, serve, picture):
    job = ServersJob()
    browser.show(serve(job))
    finished = (
        "Number([...document.querySelectorAll('#summary dt')].find(each => each.textContent === 'finished')"
    )
    finished += ".nextSibling.textContent.replace(',', ''))"
    first = browser.value(finished)
    browser.wait_until(f"{finished} >= {first} + 2")
    assert browser.value("document.title") == f"{ATTACK} · {ATTACK}, 4 tasks"
    assert browser.texts("#metrics dt") == [ATTACK, "val_loss"]
    assert browser.texts("#tasks tr:nth-child(2) td:nth-child(3)") == [ATTACK]
    assert browser.value("document.querySelectorAll('img').length") == 0
    assert browser.value("document.querySelectorAll('script').length") == 1
    assert browser.texts("#trouble") == [""]
    for width, is_dark in WINDOWS:
        browser.resize(width, is_dark=is_dark)
        assert browser.value("document.documentElement.scrollWidth") == width
    picture("parameter-servers")
    assert browser.errors == []


def test_page_keeps_its_place_when_it_refreshes(browser, serve):
    browser.show(serve(Job()), width=360)
    browser.value("document.querySelector('#table').scrollLeft = 150")
    before = browser.value("document.querySelector('header p').textContent")
    browser.wait_until(f"document.querySelector('header p').textContent !== {before!r}")
    assert browser.value("document.querySelector('#table').scrollLeft") == 150


def test_page_says_when_its_data_are_old(browser, serve, monkeypatch):
    browser.show(serve(Job()))

    def no_answer(server, query):
        raise OSError

    monkeypatch.setattr(StatusServer, "page", no_answer)
    browser.wait_until("document.querySelector('#trouble').textContent !== ''")
    (said,) = browser.texts("#trouble")
    assert re.fullmatch(r"The job has not answered for \d+ s: what is shown is old\.", said)
    assert browser.texts("h1"), "the old figures stay"

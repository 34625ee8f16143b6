"""The status page in a browser: it refreshes itself, and says so when it cannot. The tests are skipped without
Chromium."""

import os
import re
import shutil
import subprocess

import pytest

from checks import closure_statistics
from replicax._src.parameter_servers.coordinator.status import status_of
from replicax._src.status.page import page_of
from replicax._src.status.server import StatusServer
from replicax._src.status.status import with_rates

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
LIMIT_S = 60
ATTACK = "<img src=x onerror=\"document.title='attacked'\"><script>document.title='attacked'</script>"

pytestmark = [
    pytest.mark.timeout(180),
    pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome"),
]


def status(num_asked):
    """Each answer has one more finished closure, with an ugly name."""
    worker = {
        "connected": True,
        "given_up": False,
        "connections": 1,
        "restarts": 0,
        "function": ATTACK,
        "in_flight": 1,
        "statistics": {},
    }
    histogram = {"0": 3, "1": 1}
    ps = {
        "connected": False,
        "restarts": 0,
        "statistics": {"staleness": {"num": 4, "mean": 0.25, "max": 1, "histogram": histogram}},
    }
    statistics = {
        "closures": closure_statistics(finished=1000 + num_asked),
        "workers": {"worker 0": worker},
        "ps": {"ps 0": ps, "ps 1": {**ps, "connected": True}},
    }
    return status_of(statistics, {"pid": 1, "uptime_s": 3.0 + num_asked, "resident_bytes": 1 << 30}, 0.0)


@pytest.fixture
def server(monkeypatch):
    """Answers ``num_answers`` times; ``asked`` gets an entry each time."""
    asked = []

    def told(listener):
        asked.append(len(asked) + 1)
        if len(asked) > server.num_answers:
            raise OSError("no answer")
        return with_rates(None, status(len(asked)))

    monkeypatch.setattr(StatusServer, "status", told)
    server = StatusServer("127.0.0.1:0", None, lambda: status(0))
    server.num_answers, server.asked = 1000, asked
    server.start()
    yield server
    server.close()


@pytest.fixture
def browse(tmp_path):
    """Shows a page in a browser, and returns the resulting text."""

    def browse(*options):
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        profile = f"--user-data-dir={tmp_path}/profile"
        command = [BROWSER, "--headless", "--disable-gpu", "--hide-scrollbars", profile, *sandbox, *options]
        run = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
        return run.stdout

    return browse


def finished(dom):
    (shown,) = re.findall(r"<dt>finished</dt><dd>([\d,]+)</dd>", dom)
    return int(shown.replace(",", "")) - 1000


def test_page_refreshes_itself_and_executes_no_name(server, browse):
    dom = browse("--virtual-time-budget=3500", "--dump-dom", server.url)
    assert finished(dom) == server.asked[-1] >= 3
    assert "<title>replicax status</title>" in dom
    assert "&lt;img src=x" in dom
    assert "<img" not in dom
    assert 'role="status"></p>' in dom


def test_page_says_when_its_data_are_old(server, browse):
    server.num_answers = 2
    dom = browse("--virtual-time-budget=6500", "--dump-dom", server.url)
    assert finished(dom) == 2
    assert len(server.asked) > 2
    assert re.search(r"The job has not answered for \d+ s: what is shown is old\.</p>", dom)


MEASURE = (
    "<script>document.title = document.documentElement.scrollWidth + ' of ' + innerWidth</script></body>"
)


@pytest.mark.parametrize("width", [1280, 500])
def test_the_page_fits_into_a_window(browse, tmp_path, width):
    """Wide contents scroll within the page."""
    page = page_of(with_rates(None, status(0)))
    (tmp_path / "page.html").write_text(page.replace("</body>", MEASURE))
    dom = browse(f"--window-size={width},900", "--dump-dom", f"file://{tmp_path}/page.html")
    assert f"<title>{width} of {width}</title>" in dom

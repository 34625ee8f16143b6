"""``replicax top``: how it shows a coordinator's status, where it looks for it, and how it ends."""

import http.server
import io
import itertools
import json
import re
import threading
import time
import urllib.request

import pytest

from checks import closure_statistics
from replicax.__main__ import main
from replicax._launch import top
from replicax._ps.coordinator.statistics import status_of
from replicax._src.status.access import viewing_token
from replicax._src.status.http_server import StatusServer

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("REPLICAX_TOKEN", "REPLICAX_TOKEN_FILE", "REPLICAX_STATUS_ADDRESS", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)


class Cluster:
    """A worker that runs one closure per look."""

    num_finished = 0

    def look(self):
        self.num_finished += 1
        worker = {
            "connected": True,
            "given_up": False,
            "connections": 1,
            "restarts": 2,
            "function": "train_step",
            "in_flight": 1,
            "statistics": {"process": {"pid": 4321, "uptime_s": 65.0, "resident_bytes": 300 << 20}},
        }
        statistics = {
            "closures": closure_statistics(finished=self.num_finished),
            "workers": {"worker 0": worker},
            "ps": {},
        }
        return status_of(statistics, {"pid": 1, "uptime_s": time.monotonic(), "resident_bytes": 1 << 20}, 0.0)


@pytest.fixture
def server():
    server = StatusServer("127.0.0.1:0", None, Cluster().look)
    server.start()
    yield server
    server.close()


def address_of(server):
    return server.url.removeprefix("http://").rstrip("/")


@pytest.mark.parametrize("write", [lambda url: url, lambda url: url.removeprefix("http://").rstrip("/")])
def test_once_shows_lines(server, capsys, write):
    assert main(["top", write(server.url), "--once"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "replicax  2 tasks"
    assert lines[1].startswith("closures/s ")
    assert "  queued 0  in flight 0  failed 0" in lines[1]
    assert lines[2] == "staleness: lately –  mean –  max –"
    assert lines[3].split()[:4] == ["task", "state", "function", "closures/s"]
    assert lines[5].split() == [
        *["worker", "0", "busy", "train_step", "–", "–", "–", "–"],
        "300",
        "MB",
        "2",
        "4321",
        *["1", "min", "5", "s"],
    ]


def test_json_is_a_line_each_time_until_the_coordinator_ends(server, capsys):
    def end_after_three():
        while len(seen) < 3:
            time.sleep(0.01)
        server.close()

    seen = []
    fetch = top.fetch
    thread = threading.Thread(target=end_after_three)
    thread.start()

    def fetch_and_count(request):
        status = fetch(request)
        seen.append(status)
        return status

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(top, "fetch", fetch_and_count)
        assert main(["top", server.url, "--json", "--interval", "0.1", "--wait", "0"]) == 0
    thread.join()
    told = capsys.readouterr()
    statuses = [json.loads(line) for line in told.out.splitlines()]
    assert statuses == seen
    finished = [status["closures"]["finished"] for status in statuses]
    assert finished == sorted(set(finished))
    assert told.err == "The job has ended.\n"


def test_a_restarted_job_is_shown_again(server, capsys, monkeypatch):
    """It answers, is down for two looks, answers again and ends."""
    status = top.fetch(top.request_of(server.url, {}))
    down = top.StatusUnavailable("refused", is_over=True)
    answers = itertools.chain([status, down, down, status], itertools.repeat(down))

    def answer(_):
        told = next(answers)
        if told is down:
            raise down
        return told

    monkeypatch.setattr(top, "fetch", answer)
    assert main(["top", server.url, "--json", "--interval", "0.1", "--wait", "0.5"]) == 0
    told = capsys.readouterr()
    assert len(told.out.splitlines()) == 2
    assert told.err == "The job does not answer; it may be restarting.\n" * 2 + "The job has ended.\n"


@pytest.mark.parametrize("told", [{"tasks": []}, {"tasks": [{}]}, {"tasks": ["worker 0"]}, {}, []], ids=repr)
def test_json_of_another_program_is_reported(server, capsys, monkeypatch, told):
    monkeypatch.setattr(server, "status", lambda: told)
    assert main(["top", server.url, "--once"]) == 1
    assert "is not the chief of a replicax job." in capsys.readouterr().err


def test_ctrl_c_ends_it_with_130_as_it_ends_the_other_commands(server, capsys, monkeypatch):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(top, "fetch", interrupted)
    assert main(["top", server.url]) == 130
    assert capsys.readouterr().err == ""


def test_names_that_are_no_text_are_served(server, monkeypatch):
    """Such as that of a file whose name is not UTF-8, in Python: with half a character."""
    status = server.status()
    monkeypatch.setattr(server, "status", lambda: {**status, "metrics": {"bad \udcff": 1.0}})
    for page in ("", "status.json", "metrics"):
        with urllib.request.urlopen(f"{server.url}{page}", timeout=30) as answer:
            assert "bad \\udcff" in answer.read().decode()


def test_address_may_come_from_the_environment(server, capsys, monkeypatch):
    monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", address_of(server))
    assert main(["top", "--once", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"][1]["task"] == "worker 0"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "which job? Give the address of its status, or set REPLICAX_STATUS_ADDRESS"),
        (["ftp://host/"], "'ftp://host/' is not the address of a status: write host:port"),
        (["host:99999"], "Port out of range"),
        (["--interval", "0"], "'0' is not a number of seconds of at least 0.1: frequent requests"),
    ],
)
def test_invalid_options_raise(capsys, arguments, message):
    with pytest.raises(SystemExit) as ended:
        main(["top", *arguments])
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("text", [b"[" * 100_000, b"", b"\xff", b'{"tasks": ' + b"[" * 300], ids=len)
def test_text_of_another_program_is_reported(capsys, text):
    class Answers(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text)

        def log_message(self, *args):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Answers) as other:
        threading.Thread(target=other.handle_request, daemon=True).start()
        assert main(["top", f"127.0.0.1:{other.server_port}", "--once"]) == 1
    assert "is not the chief of a replicax job." in capsys.readouterr().err


def test_no_listener_is_reported(server, capsys):
    server.close()
    assert main(["top", server.url, "--once"]) == 1
    assert f"replicax top: Nobody answers at {server.url}: " in capsys.readouterr().err


def test_answer_of_another_program_is_reported(server, capsys):
    assert main(["top", f"{server.url}elsewhere", "--once"]) == 1
    assert "/status.json, /metrics" in capsys.readouterr().err


@pytest.mark.parametrize("said", ["chief:80", "http://chief:80", "http://chief:80/"])
def test_token_is_derived_from_the_clusters(said):
    request = top.request_of(said, {"REPLICAX_TOKEN": "secret"})
    assert request.full_url == "http://chief:80/status.json"
    assert request.get_header("Authorization") == f"Bearer {viewing_token('secret')}"
    assert top.request_of(said, {}).get_header("Authorization") is None


def test_the_token_of_the_url_comes_first():
    request = top.request_of("http://chief:80/?token=shown", {"REPLICAX_TOKEN": "secret"})
    assert request.full_url == "http://chief:80/status.json"
    assert request.get_header("Authorization") == "Bearer shown"


# --- on a terminal -------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self):
        return True


def view(output, **how):
    return top.StatusView(output, io.StringIO(), {"TERM": "xterm"}, **how)


def test_a_terminal_gets_a_table(server, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    output = Terminal()
    shown = view(output)
    shown.show(top.fetch(top.request_of(server.url, {})))
    shown.note("no answer")
    shown.close()
    text = output.getvalue()
    assert "train_step" in text
    assert "300 MB" in text
    assert "no answer" in text
    assert "\x1b[32mbusy" in text


@pytest.mark.parametrize(("width", "shown"), [(200, "pid up function"), (80, ""), (100, "function")])
def test_narrow_table_drops_less_important_columns(server, monkeypatch, width, shown):
    monkeypatch.setenv("COLUMNS", str(width))
    output = Terminal()
    table = view(output)
    table.show(top.fetch(top.request_of(server.url, {})))
    table.close()
    head, *_ = [line for line in output.getvalue().splitlines() if "closures/s" in line and "state" in line]
    words = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", head).split()
    assert {"task", "state", "closures/s", "updates/s", "received/s", "memory", "restarts"} <= set(words)
    assert set(words) & {"pid", "up", "function"} == set(shown.split())


@pytest.mark.parametrize(
    ("output", "terminal", "how"),
    [
        (Terminal, "xterm", {"is_json": True}),
        (Terminal, "xterm", {"is_plain": True}),
        (Terminal, "dumb", {}),
        (io.StringIO, "xterm", {}),
    ],
    ids=["json", "plain", "dumb", "no terminal"],
)
def test_others_get_lines(server, output, terminal, how):
    written = output()
    shown = top.StatusView(written, io.StringIO(), {"TERM": terminal}, **how)
    shown.show(top.fetch(top.request_of(server.url, {})))
    shown.close()
    assert "train_step" in written.getvalue()
    assert "\x1b" not in written.getvalue()


def test_reader_may_close_the_pipe(server, monkeypatch):
    class Closed(io.StringIO):
        def write(self, text):
            raise BrokenPipeError

        def fileno(self):
            return spare.fileno()

    with open("/dev/null", "w") as spare:
        monkeypatch.setattr("sys.stdout", Closed())
        assert main(["top", server.url]) == 0

"""The coordinator's status over HTTP: who may see it, its contents, and that it ends with the coordinator."""

import contextlib
import gc
import http.client
import json
import socket
import threading
import urllib.parse

import pytest

from memory_cluster import MemoryCluster, eventually
from replicax._src.cluster.errors import AddressError
from replicax._src.status import http_server as status_server
from replicax._src.status.access import StatusAccess, viewing_token
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax.coordinator import ClusterCoordinator

TOKEN = "a secret"
LOOPBACK = "127.0.0.1:0"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in ("REPLICAX_TOKEN", "REPLICAX_TOKEN_FILE", "REPLICAX_STATUS_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def coordinator(cluster):
    with ClusterCoordinator(cluster, status_address=LOOPBACK) as coordinator:
        yield coordinator


def port_of(coordinator):
    return urllib.parse.urlsplit(coordinator.status_url).port


def get(coordinator, path="/", method="GET", **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port_of(coordinator), timeout=60)
    try:
        connection.request(method, path, headers=headers)
        answer = connection.getresponse()
        return answer.status, answer.headers, answer.read().decode()
    finally:
        connection.close()


def add(call, x):
    call.push()
    return x


# --- strangers ---------------------------------------------------------------------------------------------


def test_idle_connections_do_not_keep_others_out(coordinator):
    idle = [socket.create_connection(("127.0.0.1", port_of(coordinator)), timeout=60) for _ in range(300)]
    try:
        assert get(coordinator, "/status.json")[0] == 200
        idle[0].settimeout(60)
        assert idle[0].recv(1) == b""  # the oldest was dropped
    finally:
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("said", [b"GET / HTTP/1.0\r\nX: " + b"x" * 100_000, b"\xff" * 5000, b"GET /"])
def test_endless_request_is_not_waited_for(coordinator, monkeypatch, said):
    monkeypatch.setattr(status_server, "HANDSHAKE_S", 0.3)
    with socket.create_connection(("127.0.0.1", port_of(coordinator)), timeout=60) as connection:
        connection.sendall(said)
        with contextlib.suppress(ConnectionError):
            assert b" 200 " not in connection.recv(100)
    assert get(coordinator, "/status.json")[0] == 200


# --- who may see it ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("host", [None, "localhost:80", "127.0.0.1:8080", "localhost", "[::1]:80", "[::1]"])
def test_programs_of_this_machine_may_see_it(host):
    assert StatusAccess("127.0.0.1:80", None).admits("127.0.0.1", host, None)
    assert StatusAccess("0.0.0.0:80", TOKEN).admits("127.0.0.1", host, None)


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "[", "a b"]
)
def test_pages_of_other_sites_may_not(host):
    """The name of the request was made to point to this machine."""
    assert not StatusAccess("127.0.0.1:80", None).admits("127.0.0.1", host, None)
    assert not StatusAccess("127.0.0.1:80", TOKEN).admits("127.0.0.1", host, None)


def test_other_machines_need_the_token_for_it_which_is_not_the_cluster_s():
    access = StatusAccess("0.0.0.0:80", TOKEN)
    assert access.admits("10.0.0.7", "chief:80", viewing_token(TOKEN))
    for shown in (None, "", TOKEN, viewing_token("another"), "ä"):
        assert not access.admits("10.0.0.7", "127.0.0.1:80", shown)
    assert TOKEN not in viewing_token(TOKEN)


def test_without_a_token_other_machines_have_no_access():
    with pytest.raises(InvalidArgumentError, match=r"0\.0\.0\.0:80.*REPLICAX_TOKEN"):
        StatusAccess("0.0.0.0:80", None)
    assert not StatusAccess("127.0.0.1:80", None).admits("10.0.0.7", "127.0.0.1:80", None)


# --- what is there -----------------------------------------------------------------------------------------


def test_activity_is_shown(cluster, coordinator):
    for _ in range(5):
        coordinator.schedule(add, (1,))
    coordinator.join(60)
    code, headers, text = get(coordinator, "/status.json")
    status = json.loads(text)
    assert (code, headers["Content-Type"]) == (200, "application/json")
    assert status["closures"]["finished"] == 5
    assert [task["task"] for task in status["tasks"]] == ["coordinator", "worker 0", "worker 1", "ps 0"]
    assert status["tasks"][0]["resident_bytes"] > 1 << 20
    code, headers, text = get(coordinator, "/metrics")
    assert (code, headers["Content-Type"]) == (200, "text/plain; version=0.0.4; charset=utf-8")
    assert "replicax_closures_finished_total 5\n" in text
    code, headers, text = get(coordinator)
    assert code == 200
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "<td>worker 1</td>" in text


def test_rates_are_known_at_the_first_look(coordinator):
    eventually(lambda: coordinator._status._recent._statuses)
    status = json.loads(get(coordinator, "/status.json")[2])
    assert status["closures"]["finished_per_s"] == 0.0


def test_function_of_a_busy_worker_is_shown(cluster, coordinator):
    goes_on = threading.Event()

    def waits(call):
        goes_on.wait(90)
        return 1

    coordinator.schedule(waits)
    try:
        eventually(lambda: "waits" in get(coordinator, "/status.json")[2])
        workers = [t for t in json.loads(get(coordinator, "/status.json")[2])["tasks"] if t["function"]]
        assert [(worker["state"], worker["in_flight"]) for worker in workers] == [("busy", 1)]
    finally:
        goes_on.set()


def test_restarts_are_counted(cluster, coordinator):
    def restarts():
        return {
            task["task"]: task["restarts"]
            for task in json.loads(get(coordinator, "/status.json")[2])["tasks"]
        }

    def all_connected():
        told = coordinator.statistics()
        beaten = all(each["statistics"] for each in told["ps"].values())
        return beaten and all(each["connected"] for each in told["workers"].values())

    eventually(all_connected)
    assert restarts() == {"coordinator": None, "worker 0": 0, "worker 1": 0, "ps 0": 0}
    cluster.workers[1].restart()
    eventually(lambda: restarts()["worker 1"] == 1)
    for link in list(cluster.workers[0].links):  # the same process, another connection
        link.cut()
    eventually(lambda: coordinator.statistics()["workers"]["worker 0"]["connections"] == 2)
    assert restarts()["worker 0"] == 0
    cluster.ps[0].restart()
    cluster.ps[0].incarnation = cluster.incarnation
    eventually(lambda: restarts()["ps 0"] == 1)


def test_other_paths_and_methods_are_rejected(coordinator):
    code, _, text = get(coordinator, "/etc/passwd")
    assert (code, text) == (404, "There are /, /status.json, /metrics.\n")
    assert get(coordinator, "/", "POST")[0] == 501
    code, headers, text = get(coordinator, "/", "HEAD")
    assert (code, text) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_invalid_or_silent_peer_delays_no_other(coordinator):
    with socket.create_connection(("127.0.0.1", port_of(coordinator))) as silent:
        with socket.create_connection(("127.0.0.1", port_of(coordinator)), timeout=60) as babbling:
            babbling.sendall(b"\x00\xff" * 100 + b"\r\n\r\n")
            assert b"400" in babbling.recv(1000)
        silent.sendall(b"GET / HT")
        assert get(coordinator)[0] == 200


def test_token_is_required_if_set(cluster, monkeypatch):
    monkeypatch.setenv("REPLICAX_TOKEN", TOKEN)
    with ClusterCoordinator(cluster, status_address="0.0.0.0:0") as coordinator:
        assert get(coordinator)[0] == 200  # of this machine
        url = urllib.parse.urlsplit(coordinator.status_url)
        assert url.query == f"token={viewing_token(TOKEN)}"
        code, headers, text = get(coordinator, Host="chief:80")
        assert (code, headers["WWW-Authenticate"]) == (401, "Bearer")
        assert "Authorization: Bearer" in text
        assert get(coordinator, "/?token=wrong", Host="chief:80")[0] == 401
        assert get(coordinator, "/status.json", Host="chief:80", Authorization=f"Bearer {TOKEN}")[0] == 401
        code, _, text = get(coordinator, f"/?{url.query}", Host="chief:80")
        assert code == 200
        assert f'href="metrics?{url.query}"' in text
        bearer = f"Bearer {viewing_token(TOKEN)}"
        assert get(coordinator, "/status.json", Host="chief:80", Authorization=bearer)[0] == 200


# --- where and how long -------------------------------------------------------------------------------------


def test_status_server_is_off_by_default(cluster, monkeypatch):
    with ClusterCoordinator(cluster) as coordinator:
        assert coordinator.status_url is None
    monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", LOOPBACK)
    with ClusterCoordinator(cluster) as coordinator:
        assert get(coordinator)[0] == 200
        with pytest.raises(InvalidArgumentError, match="already has a ClusterCoordinator"):
            ClusterCoordinator(cluster, status_address="127.0.0.1:1")


def is_free(port):
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) != 0


def test_it_ends_with_the_coordinator_and_its_address_can_be_had_again(cluster):
    with ClusterCoordinator(cluster, status_address=LOOPBACK) as coordinator:
        port = port_of(coordinator)
        assert get(coordinator)[0] == 200
    assert is_free(port)
    with ClusterCoordinator(cluster, status_address=f"127.0.0.1:{port}") as coordinator:
        assert get(coordinator)[0] == 200


def test_it_ends_when_the_coordinator_is_dropped(fast):
    cluster = MemoryCluster()
    coordinator = ClusterCoordinator(cluster, status_address=LOOPBACK)
    port = port_of(coordinator)
    del coordinator
    gc.collect()
    eventually(lambda: is_free(port))
    cluster.end()


def test_used_address_raises_and_leaves_no_threads(cluster):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        before = set(threading.enumerate())  # of which some may be ending
        with pytest.raises(AddressError, match=r"127\.0\.0\.1:\d+.*in use"):
            ClusterCoordinator(cluster, status_address=f"127.0.0.1:{other.getsockname()[1]}")
        eventually(lambda: set(threading.enumerate()) <= before)
    with ClusterCoordinator(cluster, status_address=LOOPBACK) as coordinator:
        assert get(coordinator)[0] == 200


def test_used_address_of_the_environment_is_only_a_warning(cluster, monkeypatch, caplog):
    """The launcher may have chosen it, and the job does not need its status."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setenv("REPLICAX_STATUS_ADDRESS", f"127.0.0.1:{other.getsockname()[1]}")
        with ClusterCoordinator(cluster) as coordinator:
            assert coordinator.status_url is None
    assert "This job has no status, because of REPLICAX_STATUS_ADDRESS" in caplog.text

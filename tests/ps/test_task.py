"""``Server`` in this process: a worker and a parameter server that get questions, are stopped, taken over and left
alone."""

import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import replicax as rx
from checks import catches, in_a_process_of_its_own, message
from replicax._ps.store.group_rules import View
from replicax._ps.task.service import TaskService
from replicax._ps.task.session_rules import TaskSession
from replicax._ps.task.work import host_of
from replicax._ps.transport.messages import Message
from replicax._ps.transport.transport import TaskClient
from replicax._src.cluster.credentials import Credentials
from replicax._src.cluster.machine_layout import free_ports
from replicax._src.cluster.spec import ClusterSpec, Task
from replicax._src.devices.program_cache import host_folder
from replicax._src.vocabulary.errors import (
    MessageError,
    RemoteError,
    StaleCoordinatorError,
    UnauthenticatedError,
    UnavailableError,
)
from replicax.errors import ClusterError, ContextError, InvalidArgumentError

pytestmark = pytest.mark.timeout(180)
CREDENTIALS = Credentials(token="a secret of this test")
CLUSTER = {"chief": ["h:1"], "worker": ["h:2", "h:3"], "ps": ["h:4"]}


def options(**more):
    return rx.ServerOptions(credentials=CREDENTIALS, **more)


@pytest.fixture
def started():
    """``started(job, **options)``: a server at a free port, and a client of it. Both end with the test."""
    open_things = []

    def start(job, **more):
        port = free_ports(1)[0]
        cluster = {"worker": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], job: [f"127.0.0.1:{port}"]}
        server = rx.Server(cluster, job, 0, config=options(**more))
        client = TaskClient(f"127.0.0.1:{port}", CREDENTIALS, f"{job} 0")
        open_things.extend([client, server])
        return server, client

    yield start
    for thing in open_things:
        thing.close()


def until(condition, what, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {limit_s} s: {what}"
        time.sleep(0.01)


def hello(client, incarnation, ps=()):
    return client.ask("hello", {"incarnation": incarnation, "ps": list(ps)}, 60.0)


def create(incarnation, key, value):
    shard = {"key": key, "shape": list(value.shape), "dtype": str(value.dtype), "initial": "array"}
    return Message({"op": "create", "incarnation": incarnation, "shards": [shard]}, [value])


def pull(incarnation, key):
    header = {"closure": None, "low": 0, "program": None, "pull": [[key, None]], "rows": []}
    return Message({"op": "step", "incarnation": incarnation, **header})


# --- which task it is ---------------------------------------------------------------------------------


def test_omitted_options_follow_from_others():
    def definition(*args, **more):
        return rx.Server(*args, **more, start=False).server_def

    alone = definition({"ps": ["localhost:0"]})
    assert (alone.job_name, alone.task_index, alone.protocol) == ("ps", 0, "grpc")
    assert definition(ClusterSpec(CLUSTER), "worker", 1).address == "h:3"
    assert definition(CLUSTER, "ps").task == Task("ps", 0)
    of_def = definition(alone, protocol="grpc")
    assert of_def == alone
    assert definition(rx.ServerDef(ClusterSpec(CLUSTER), "ps", 0), "worker", 1).task == Task("worker", 1)


@pytest.mark.parametrize(
    ("error", "arguments", "says"),
    [
        (
            InvalidArgumentError,
            {"task_index": 0},
            ["Must specify an explicit `job_name`", "chief, worker, ps"],
        ),
        (InvalidArgumentError, {"job_name": "worker"}, ["Must specify an explicit `task_index`", "0, 1"]),
        (InvalidArgumentError, {"job_name": "chief"}, ["'worker' or 'ps'", "run your program"]),
        (InvalidArgumentError, {"job_name": "ps", "protocol": "grpc+verbs"}, ["'grpc+verbs'", "'grpc+tls'"]),
        (InvalidArgumentError, {"job_name": "ps", "protocol": "grpc+tls"}, ["REPLICAX_TLS_CERTIFICATE"]),
        (InvalidArgumentError, {"job_name": "ps", "config": object()}, ["rx.ServerOptions", "got object"]),
    ],
)
def test_invalid_arguments_of_a_server(error, arguments, says):
    message(error, lambda: rx.Server(CLUSTER, **arguments), *says)


def test_a_cluster_without_this_task():
    with pytest.raises(ClusterError, match="exceeds"):
        rx.Server(CLUSTER, "worker", 2, start=False)
    with pytest.raises(TypeError, match="must be a dictionary"):
        rx.Server(["h:1"], start=False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"on_coordinator_loss": "stay"}, "'wait' or 'exit'"),
        ({"silence_timeout_s": 0}, "silence_timeout_s must be"),
        ({"wait_timeout_s": float("nan")}, "wait_timeout_s must be"),
        ({"log_bytes": 0}, "got 0"),
        ({"log_bytes": 1e9}, "got 1000000000.0"),
    ],
)
def test_invalid_options(arguments, says):
    message(InvalidArgumentError, lambda: rx.ServerOptions(**arguments), says)


def test_log_bytes_reaches_the_log():
    definition = rx.ServerDef(ClusterSpec(CLUSTER), "ps", 0)
    host = host_of(definition, rx.ServerOptions(log_bytes=12345), CREDENTIALS)
    host.begin("me", [])
    view = View(0, 1, 0, 1)
    host.asks["group"]({"incarnation": "me", "view": view.described(), "ps": ["a:1", "b:1"]})
    assert host._copies._copies[0]._state.rules.log.max_bytes == 12345


def test_a_server_whose_port_is_in_use_starts_when_it_is_free():
    (port,) = free_ports(1)
    server = rx.Server({"ps": [f"127.0.0.1:{port}"]}, config=options(), start=False)
    with socket.create_server(("127.0.0.1", port)):
        message(UnavailableError, server.start, f"cannot listen at 127.0.0.1:{port}")
    server.start()
    server.close()


# --- what it answers ----------------------------------------------------------------------------------


def test_a_parameter_server_holds_variables(started):
    server, client = started("ps")
    assert server.target == f"grpc://{server.server_def.address}"
    told = hello(client, "a")
    assert told["task"] == "ps 0"
    assert told["platform"] == "cpu"
    assert told["num_devices"] == 8
    assert set(told["versions"]) == {"jax", "jaxlib"}
    value = np.arange(6, dtype=np.float32)
    with client.open() as link:
        link.call(create("a", "w", value), 60.0)
        answer = link.call(pull("a", "w"), 60.0)
        np.testing.assert_array_equal(answer.arrays[0], value)
        assert answer.header["versions"][0][0] == told["instance"]
    heartbeat = client.ask("heartbeat", {"incarnation": "a"}, 60.0)
    assert (heartbeat["instance"], heartbeat["statistics"]["shards"]) == (told["instance"], 1)
    until(lambda: server.statistics()["messages"] == 4, "all answers are counted")


def test_a_worker_answers_what_a_worker_does(started):
    _, client = started("worker")
    hello(client, "a", ["127.0.0.1:1"])
    with client.open() as link:
        constant = Message({"op": "constant", "incarnation": "a", "name": "c"}, [np.ones(3, np.float32)])
        assert not link.call(constant, 60.0).arrays
        with pytest.raises(MessageError, match="no operation 'create'"):
            link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
    assert client.ask("heartbeat", {"incarnation": "a"}, 60.0)["statistics"]["num_closures"] == 0


def test_client_with_another_token_is_told(started):
    server, _ = started("ps")
    with TaskClient(server.server_def.address, Credentials(token="wrong"), "ps 0") as client:
        message(UnauthenticatedError, lambda: client.ask("stop", {}, 60.0), "ps 0", "wrong token")
    until(lambda: server.statistics()["rejected"] == 1, "the refusal is counted")


def test_unknown_question(started):
    _, client = started("ps")
    message(InvalidArgumentError, lambda: client.ask("dance", {}, 60.0), "'dance'", "hello, heartbeat, leave")


def test_status_changes_nothing(started):
    _, client = started("ps")
    assert client.ask("status", {}, 60.0)["incarnation"] is None
    hello(client, "a")
    status = client.ask("status", {}, 60.0)
    assert (status["incarnation"], status["task"], status["statistics"]["shards"]) == ("a", "ps 0", 0)


def test_the_next_coordinator_takes_over(started):
    _, client = started("ps")
    hello(client, "a")
    with client.open() as link:
        link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
        hello(client, "b")
        message(StaleCoordinatorError, lambda: link.call(pull("a", "w"), 60.0), "another coordinator")
        message(
            StaleCoordinatorError, lambda: client.ask("heartbeat", {"incarnation": "a"}, 60.0), "taken over"
        )
        with pytest.raises(InvalidArgumentError):  # what the one before made is gone
            link.call(pull("b", "w"), 60.0)


def test_leaving_drops_everything(started):
    _, client = started("ps")
    hello(client, "a")
    with client.open() as link:
        link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
        client.ask("leave", {"incarnation": "a"}, 60.0)
        message(StaleCoordinatorError, lambda: link.call(pull("a", "w"), 60.0), "it has left")
    client.ask("leave", {"incarnation": "a"}, 60.0)  # twice is nothing
    hello(client, "b")
    assert client.ask("heartbeat", {"incarnation": "b"}, 60.0)["statistics"]["shards"] == 0


# --- a service, without a server ----------------------------------------------------------------------


class FakeWork:
    def __init__(self, incarnation, ps):
        self.incarnation, self.ps, self.is_closed = incarnation, ps, False

    def answer(self, message):
        return Message({"for": self.incarnation})

    def statistics(self):
        return {"for": self.incarnation}

    def close(self):
        self.is_closed = True


class FakeHost:
    instance, restored, snapshots = "i", None, None

    def __init__(self):
        self.works = []
        self.asks = {"dance": lambda header: {"danced": True}}

    def begin(self, incarnation, ps):
        if ps == ["broken"]:
            raise OSError("no such ps")
        self.works.append(FakeWork(incarnation, ps))
        return self.works[-1]


@pytest.fixture
def host():
    return FakeHost()


@pytest.fixture
def service(host):
    return TaskService(Task("worker", 0), host, {}, TaskSession("worker 0", 60.0, time.monotonic()))


def test_one_session_per_coordinator(service, host):
    for incarnation in ("a", "a", "b"):
        service.ask("hello", {"incarnation": incarnation, "ps": ["p:1"]})
    first, second = host.works
    assert (first.incarnation, first.ps, first.is_closed) == ("a", ["p:1"], True)
    assert (second.incarnation, second.is_closed) == ("b", False)


def test_messages_name_their_coordinator(service):
    service.ask("hello", {"incarnation": "a", "ps": []})
    of_a = Message({"op": "program", "incarnation": "a"})
    assert service.answer(of_a).header == {"for": "a"}
    message(StaleCoordinatorError, lambda: service.answer(Message({"op": "x"})), "None")
    service.ask("hello", {"incarnation": "b", "ps": []})
    message(StaleCoordinatorError, lambda: service.answer(of_a), "taken over")


def test_messages_before_any_hello(service):
    message(UnavailableError, lambda: service.answer(Message({"op": "program"})), "hello")


def test_failed_hello_can_be_repeated(service):
    with pytest.raises(OSError, match="no such ps"):
        service.ask("hello", {"incarnation": "a", "ps": ["broken"]})
    assert service.incarnation is None
    service.ask("hello", {"incarnation": "a", "ps": ["p:1"]})
    assert service.incarnation == "a"


def test_questions_only_for_the_coordinator(service):
    message(UnavailableError, lambda: service.ask("dance", {"incarnation": "a"}), "does not know", "a")
    service.ask("hello", {"incarnation": "a", "ps": []})
    assert service.ask("dance", {"incarnation": "a"}) == {"danced": True}


# --- snapshots ----------------------------------------------------------------------------------------


def test_terminated_parameter_server_resumes_where_it_was(started, tmp_path):
    server, client = started("ps", snapshot_dir=tmp_path, snapshot_interval_s=math.inf)
    assert hello(client, "a")["restored"] is None
    value = np.arange(6, dtype=np.float32)
    with client.open() as link:
        link.call(create("a", "w", value), 60.0)
    server.stop()
    again, client = started("ps", snapshot_dir=tmp_path, snapshot_interval_s=math.inf)
    with client.open() as link:  # a worker does not say hello
        answer = link.call(pull("a", "w"), 60.0)
        np.testing.assert_array_equal(answer.arrays[0], value)
    heartbeat = client.ask("heartbeat", {"incarnation": "a"}, 60.0)
    assert (heartbeat["statistics"]["shards"], heartbeat["statistics"]["num_snapshots"]) == (1, 0)
    restored = hello(client, "a")["restored"]
    assert (restored["incarnation"], restored["shards"]) == ("a", 1)
    again.stop()
    assert len(list((tmp_path / "ps-0").iterdir())) == 1, "it wrote what had not changed"
    _, client = started("ps", snapshot_dir=tmp_path)
    hello(client, "b")
    assert client.ask("heartbeat", {"incarnation": "b"}, 60.0)["statistics"]["shards"] == 0


def test_snapshots_are_taken_at_intervals_and_failures_are_logged(started, tmp_path):
    _, client = started("ps", snapshot_dir=tmp_path, snapshot_interval_s=0.05)
    hello(client, "a")

    def statistics():
        return client.ask("heartbeat", {"incarnation": "a"}, 60.0)["statistics"]

    time.sleep(0.2)
    assert statistics()["num_snapshots"] == 0  # there is nothing
    with client.open() as link:
        link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
        until(lambda: statistics()["num_snapshots"] == 1, "the first one")
        shutil.rmtree(tmp_path / "ps-0")
        (tmp_path / "ps-0").write_text("in its way")
        link.call(create("a", "v", np.ones(3, np.float32)), 60.0)
        until(lambda: "No snapshot could be written" in statistics()["snapshot_error"], "the failure")
        (tmp_path / "ps-0").unlink()
        until(lambda: statistics()["num_snapshots"] == 2, "the second one")
        assert statistics()["snapshot_error"] == ""


def test_coordinator_requests_snapshots_and_rewinds(started, tmp_path):
    _, client = started("ps", snapshot_dir=tmp_path, snapshot_interval_s=math.inf)
    instance = hello(client, "a")["instance"]
    with client.open() as link:
        link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
        assert client.ask("snapshot", {"incarnation": "a", "epoch": 7}, 60.0)["epoch"] == 7
        assign = Message({"op": "assign", "incarnation": "a", "keys": ["w"]}, [np.zeros(3, np.float32)])
        link.call(assign, 60.0)
        told = client.ask("restore", {"incarnation": "a", "epoch": 7}, 60.0)
        assert told["instance"] != instance
        assert client.ask("heartbeat", {"incarnation": "a"}, 60.0)["instance"] == told["instance"]
        np.testing.assert_array_equal(link.call(pull("a", "w"), 60.0).arrays[0], np.ones(3))
    with pytest.raises(RemoteError, match="it is of epoch 7, not 8") as caught:
        client.ask("restore", {"incarnation": "a", "epoch": 8}, 60.0)
    assert caught.value.type == "SnapshotError"


# --- its end ------------------------------------------------------------------------------------------


def joined_by(server):
    """An event that is set when ``join`` has returned, in another thread."""
    has_returned = threading.Event()

    def wait():
        server.join()
        has_returned.set()

    threading.Thread(target=wait, daemon=True).start()
    return has_returned


@pytest.mark.parametrize("how", ["asked", "stopped"])
def test_join_returns_when_it_is_stopped_also_with_open_streams(started, how):
    server, client = started("ps")
    hello(client, "a")
    link = client.open()
    link.call(create("a", "w", np.ones(3, np.float32)), 60.0)
    has_returned = joined_by(server)
    assert not has_returned.wait(0.2)
    if how == "asked":
        assert client.ask("stop", {}, 60.0) == {}
    else:
        server.stop()
    assert has_returned.wait(60.0)
    with pytest.raises(UnavailableError):
        link.call(pull("a", "w"), 5.0)
    message(ContextError, server.start, "Make another one")
    server.stop()  # twice is nothing


def test_silent_coordinator_is_given_up_and_the_next_one_is_awaited(started):
    server, client = started("ps", silence_timeout_s=0.3)
    hello(client, "a")
    until(lambda: server.statistics()["incarnation"] is None, "it is given up")
    message(StaleCoordinatorError, lambda: client.ask("heartbeat", {"incarnation": "a"}, 60.0), "0.3 s")
    hello(client, "b")


@pytest.mark.parametrize("is_asked_to_leave", [False, True])
def test_server_ends_with_its_coordinator_if_configured(started, is_asked_to_leave):
    silence_s = 60.0 if is_asked_to_leave else 0.3
    server, client = started("ps", silence_timeout_s=silence_s, on_coordinator_loss="exit")
    has_returned = joined_by(server)
    assert not has_returned.wait(0.4)  # none has come yet
    hello(client, "a")
    if is_asked_to_leave:
        client.ask("leave", {"incarnation": "a"}, 60.0)
    assert has_returned.wait(60.0)


def test_server_does_not_wait_forever_for_a_coordinator(started):
    server, _ = started("ps", wait_timeout_s=0.2)
    assert joined_by(server).wait(60.0)


def test_a_local_server_finds_a_port():
    server = rx.Server.create_local_server(start=False)
    message(ContextError, server.join, "start()")
    server = rx.Server.create_local_server(config=options())
    with server, TaskClient(server.target.removeprefix("grpc://"), CREDENTIALS, "worker 0") as client:
        server.start()  # twice is nothing
        assert client.ask("status", {}, 60.0)["task"] == "worker 0"


def test_used_port(started):
    server, _ = started("ps")
    message(
        UnavailableError,
        lambda: rx.Server(server.server_def, config=options()),
        f"cannot listen at {server.server_def.address}",
    )


# --- processes ----------------------------------------------------------------------------------------


def test_a_script_that_makes_its_server_itself(tmp_path):
    """TensorFlow's form. JAX is set up for the task that TF_CONFIG names; SIGTERM ends the process in order, and the
    coordinator's part of the script does not run in it.
    """
    ports = free_ports(2)
    addresses = [f"127.0.0.1:{port}" for port in ports]
    config = {"cluster": {"worker": addresses[:1], "ps": addresses[1:]}, "task": {"type": "ps", "index": 0}}
    program = """
    import atexit, json, os
    import jax
    import replicax as rx

    atexit.register(print, "atexit")
    resolver = rx.cluster_resolver.TFConfigClusterResolver()
    server = rx.Server(
        resolver.cluster_spec(), job_name=resolver.task_type, task_index=resolver.task_id,
        protocol=resolver.rpc_layer or "grpc", start=True,
    )
    told = [os.environ["PJRT_NPROC"], jax.default_backend(), jax.config.jax_compilation_cache_dir]
    print(json.dumps(told), flush=True)
    try:
        server.join()
    finally:
        print("finally")
    print("the coordinator's part", flush=True)
    """
    environment = {
        "TF_CONFIG": json.dumps(config),
        "REPLICAX_TOKEN": "a secret",
        "XDG_CACHE_HOME": str(tmp_path),
    }
    dropped = ("PJRT_", "JAX_", "XLA_", "REPLICAX_CACHE_")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    process = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", "\n".join(line[4:] for line in program.splitlines())],
        env={**clean, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        num_threads, platform, folder = json.loads(process.stdout.readline())
        assert int(num_threads) == max(1, len(os.sched_getaffinity(0)) // 2)
        assert platform == "cpu"
        assert folder == str(tmp_path / "replicax" / "programs" / host_folder())
        assert (tmp_path / "replicax" / "programs").stat().st_mode & 0o777 == 0o700
        with TaskClient(addresses[1], Credentials(token="a secret"), "ps 0") as client:
            hello(client, "a")
            with client.open():
                until(lambda: catches(process.pid, signal.SIGTERM), "joining: it serves before")
                process.send_signal(signal.SIGTERM)
                assert process.communicate(timeout=60)[0] == "finally\natexit\n"
        assert process.returncode == 143
    finally:
        process.kill()
        process.communicate()


def test_join_in_the_main_thread_does_not_return_when_the_server_ends_by_itself():
    """Its options say so, because no coordinator has come."""
    printed = in_a_process_of_its_own("""
    import replicax as rx
    server = rx.Server.create_local_server(rx.ServerOptions(wait_timeout_s=0.2))
    print("joins", flush=True)
    server.join()
    print("the coordinator's part")
    """)
    assert printed == "joins\n"


def test_join_in_the_main_thread_returns_after_stop(started):
    server, _ = started("worker")
    threading.Timer(0.2, server.stop).start()
    server.join()


def test_importing_does_not_need_the_extra():
    printed = in_a_process_of_its_own("""
    import sys
    sys.modules["xxhash"] = sys.modules["cloudpickle"] = None
    import replicax as rx
    try:
        rx.Server.create_local_server()
    except rx.errors.MissingExtraError as error:
        print(error)
    """)
    assert "the extra ps" in printed

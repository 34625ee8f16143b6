"""The controller that a dead worker 0 leaves on its host serves the workers of other hosts, and the launcher waits."""

import contextlib
import json
import threading
import time

import pytest

from replicax._launch.left_controller import wait_while_it_serves
from replicax._src.cluster.channel import Channel
from replicax._src.cluster.controller_process import ControllerServer
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.control.controller import Controller
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import listen

PATIENCE_S = 30
SECURITY = Security(b"token")
pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def controller():
    """The address of a controller of two workers, and a function that ends its first process."""
    listening = listen("127.0.0.1", 0)
    address = f"127.0.0.1:{listening.getsockname()[1]}"
    of_worker = member_of(address, 1)
    server = ControllerServer(
        Controller(of_worker.names),
        listening,
        SECURITY,
        of_worker.described,
        {"coordinator": None},
        is_tolerant=True,
    )
    has_died = threading.Event()
    serving = threading.Thread(target=server.run, args=(has_died, 2.0), daemon=True)
    serving.start()
    yield address, has_died
    has_died.set()
    serving.join(PATIENCE_S)
    assert not serving.is_alive()


def member_of(address, number):
    spec = ClusterSpec({"worker": [address, "127.0.0.1:1"]})
    return Membership.of(spec, "worker", number)


def environment_of(address):
    cluster = {"worker": [address, "127.0.0.1:1"]}
    return {
        "TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}}),
        "REPLICAX_TOKEN": "token",
    }


@pytest.fixture
def waiting(controller):
    """Starts a launcher that waits for the controller. Returns its thread."""
    is_over = threading.Event()

    def started():
        thread = threading.Thread(
            target=wait_while_it_serves, args=(environment_of(controller[0]), is_over), daemon=True
        )
        thread.start()
        return thread

    yield started
    is_over.set()


def test_launcher_waits_while_workers_are_connected(controller, waiting):
    address, has_died = controller
    with contextlib.ExitStack() as stack:
        for number in range(2):
            channel = Channel(member_of(address, number), SECURITY, min_workers=1)
            channel.connect(time.monotonic() + PATIENCE_S)
            stack.callback(channel.leave)
        has_died.set()
        thread = waiting()
        time.sleep(1.5)
        assert thread.is_alive()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_launcher_does_not_wait_for_a_controller_without_workers(controller, waiting):
    thread = waiting()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()

"""A session's knowledge of the parameter servers while one of its threads waits for a server."""

import threading

import pytest

from replicax._ps.client.session import Session
from replicax._ps.store.store import Store
from store_connections import server_clients


@pytest.mark.parametrize(
    "call",
    [
        lambda session: session.renew(),
        lambda session: session.meet_worker("worker 0", {"num_devices": 1, "platform": "cpu"}),
        lambda session: session.names_on(0),
        lambda session: session.restored(0, ()),
    ],
    ids=[
        "another epoch begins",
        "a worker is met",
        "the names on a server are told",
        "a server has come back",
    ],
)
def test_call_does_not_wait_for_the_thread_that_creates_variables(call):
    """That thread may wait for a parameter server, which waits for the coordinator to name a primary."""
    store = Store()
    store.hello("me")
    session = Session(server_clients([store], "me"))
    calling = threading.Thread(target=call, args=(session,), daemon=True)
    with session._lock:
        calling.start()
        calling.join(20.0)
        assert not calling.is_alive()

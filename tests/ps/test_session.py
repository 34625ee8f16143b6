"""A session's knowledge of the parameter servers while one of its threads waits for a server."""

import threading

import numpy as np
import pytest

from replicax._ps.client.session import Session
from replicax._ps.placement.server_arrays import ServerArray
from replicax._ps.store.store import Store
from replicax._ps.transport.messages import Message
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


def test_array_made_after_a_server_restarted_is_not_missing():
    store = Store()
    store.hello("me")
    session = Session(server_clients([store], "me"))
    old, new = (
        session.add(ServerArray(session, name, (2,), np.float32, lambda: np.zeros(2, np.float32)))
        for name in ("old", "new")
    )
    session.make([old, new])
    (kept,) = old.keys_on(0)
    assert session.restored(0, [kept]) == []
    store.answer(Message({"op": "drop", "keys": sorted(new.keys_on(0)), "programs": [], "incarnation": "me"}))
    assert session.restored(0, [kept]) == ["new"]

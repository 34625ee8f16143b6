"""What a client knows of the parameter servers while one of its threads waits for one of them."""

import threading

from replicax._src.parameter_servers.client.session import Session
from replicax._src.parameter_servers.store.store import Store
from store_connections import server_clients


def test_another_epoch_begins_while_variables_are_made():
    """Who makes them may wait for a parameter server, and that one for who says which server is used now."""
    session = Session(server_clients([Store()], "me"))
    renewing = threading.Thread(target=session.renew, daemon=True)
    with session._lock:
        renewing.start()
        renewing.join(20.0)
        assert not renewing.is_alive()
    assert session.epoch == 1

"""Strategies whose parameter servers are in this process: everything but the transport is as in a cluster."""

from replicax._ps.client.session import Session
from replicax._ps.store.store import Store
from replicax._ps.strategy.coordinator_form import CoordinatorForm
from replicax._ps.strategy.parameter_server import ParameterServerStrategy
from store_connections import server_clients


def servers(num_ps=2, partitioner=None, stores=None):
    """A strategy with parameter servers (``stores`` if given); its ``run_here`` runs a function on them."""
    stores = [Store() for _ in range(num_ps)] if stores is None else stores
    for store in stores:
        store.hello("a coordinator")
    form = CoordinatorForm(Session(server_clients(stores, "a coordinator")))
    return ParameterServerStrategy._of_form(form, partitioner)

"""Routes: an address of the cluster that is reached by way of another one, a tunnel or a test's proxy."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.spec import split_address

ROUTES_VARIABLE: Final = "REPLICAX_ROUTES"


def routed_address(address: str, environment: Mapping[str, str]) -> str:
    """Returns where to connect in order to reach ``address``: itself, unless ``REPLICAX_ROUTES`` says otherwise.

    ``REPLICAX_ROUTES`` is JSON, ``{"host:port": "host:port", ...}``. ``TF_CONFIG`` has the true addresses, the same
    ones for all tasks; routes are one task's. It concerns the connections of replicax, not those of JAX.

    Raises:
      ClusterEnvironmentError: It is not JSON of that form.
      AddressError: The address in it is none.

    >>> routed_address("a:2222", {"REPLICAX_ROUTES": '{"a:2222": "localhost:7000"}'})
    'localhost:7000'
    >>> routed_address("b:2222", {})
    'b:2222'
    """
    text = environment.get(ROUTES_VARIABLE, "")
    if not text:
        return address
    try:
        routes = json.loads(text)
    except json.JSONDecodeError as error:
        raise ClusterEnvironmentError(
            f"{ROUTES_VARIABLE} is not JSON ({error}): {text!r}. {_FORM}"
        ) from error
    if not isinstance(routes, dict) or not all(isinstance(to, str) for to in routes.values()):
        raise ClusterEnvironmentError(f"{ROUTES_VARIABLE} is {text!r}. {_FORM}")
    route = routes.get(address, address)
    split_address(route, source=ROUTES_VARIABLE)
    return route


_FORM: Final = 'Write {"host:port": "host:port", ...}, or leave the variable out.'

"""Routes: addresses of the cluster that are reached through another address, such as a tunnel or a test's proxy."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from replicax._src.cluster.errors import ClusterEnvironmentError
from replicax._src.cluster.spec import split_address
from replicax._src.untrusted.strict_json import TextError, read_json

ROUTES_VARIABLE: Final = "REPLICAX_ROUTES"


def routed_address(address: str, environment: Mapping[str, str]) -> str:
    """Returns the address to connect to in order to reach ``address``, which ``REPLICAX_ROUTES`` may replace.

    ``REPLICAX_ROUTES`` is JSON, ``{"host:port": "host:port", ...}``, or the absolute path of a file that has it.
    ``TF_CONFIG`` has the same addresses for all tasks; each task has its own routes. A file may change while the task
    runs: it is read for each connection. Routes apply to the connections of replicax, not to those of JAX.

    Raises:
      ClusterEnvironmentError: The variable or the file is not JSON of that form, or the file cannot be read.
      AddressError: An address in it is malformed.

    >>> routed_address("a:2222", {"REPLICAX_ROUTES": '{"a:2222": "localhost:7000"}'})
    'localhost:7000'
    >>> routed_address("b:2222", {})
    'b:2222'
    """
    said = text = environment.get(ROUTES_VARIABLE, "")
    if not text:
        return address
    if text.startswith("/"):
        try:
            text = Path(text).read_text()
        except OSError as error:
            raise ClusterEnvironmentError(
                f"{ROUTES_VARIABLE} is {said!r}, and no such file can be read: {error}. {_FORM}"
            ) from error
    try:
        routes = read_json(text)
    except TextError as error:
        raise ClusterEnvironmentError(
            f"{ROUTES_VARIABLE} is not JSON ({error}): {said!r}. {_FORM}"
        ) from error
    if not isinstance(routes, dict) or not all(isinstance(to, str) for to in routes.values()):
        raise ClusterEnvironmentError(f"{ROUTES_VARIABLE} is {said!r}. {_FORM}")
    route = routes.get(address, address)
    split_address(route, source=ROUTES_VARIABLE)
    return route


_FORM: Final = (
    'Write {"host:port": "host:port", ...} or the path of a file with it, or leave the variable out.'
)

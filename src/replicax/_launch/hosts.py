"""A cluster over several hosts with one worker on each: its addresses, and the command to paste on each host."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from replicax._src.cluster.machine_layout import tf_config
from replicax._src.cluster.spec import Task, join_address, split_address

DEFAULT_PORT: Final = 12_345


def addresses_of(hosts: Sequence[str], port: int) -> list[str]:
    """Returns ``host:port`` for each host. A host may name its own port.

    Raises:
      AddressError: An entry is not a host.

    >>> addresses_of(["h0", "h1:2222"], 12345)
    ['h0:12345', 'h1:2222']
    """
    bare = [":" not in host or (host.startswith("[") and host.endswith("]")) for host in hosts]
    addresses = [f"{host}:{port}" if is_bare else host for host, is_bare in zip(hosts, bare)]
    return [join_address(*split_address(address, source="--hosts")) for address in addresses]


def read_hosts(path: Path) -> list[str]:
    """Returns the first word of each line, which suits MPI's host files; ``#`` starts a comment.

    Raises:
      OSError: The file cannot be read.
    """
    words = [line.partition("#")[0].split() for line in path.read_text().splitlines()]
    return [line[0] for line in words if line]


def lines_to_paste(
    addresses: Sequence[str], command: Sequence[str], environment: Mapping[str, str]
) -> list[str]:
    """Returns for each worker a comment and its command, with ``TF_CONFIG`` and the common variables."""
    lines = []
    for index, address in enumerate(addresses):
        config = tf_config({"worker": addresses}, Task("worker", index))
        lines += [
            f"# on {split_address(address)[0]}:",
            " ".join(
                f"{name}={shlex.quote(value)}" for name, value in {"TF_CONFIG": config, **environment}.items()
            )
            + f" {shlex.join(command)}",
        ]
    return lines

"""The notebook view of a strategy: its replicas, their devices, and the placement of variables."""

from __future__ import annotations

from typing import Any

from replicax._src.devices.named_devices import device_name
from replicax._src.devices.topology import Topology
from replicax._src.drawing import html
from replicax._src.vocabulary.options import ShardState


def table_of(name: str, topology: Topology, placement: Any) -> str:
    """Returns a table with a row for each replica, as HTML.

    Args:
      name: The name of the strategy's class.
      topology: The devices of its replicas.
      placement: The placement of its variables.
    """
    count = topology.num_replicas
    about: dict[str, object] = {"variables": _kept_where(placement)}
    if topology.num_logical_devices > 1:
        about["logical devices"] = f"{topology.num_logical_devices} of each replica"
    names = None if topology.peers is None else topology.peers.names
    if names is not None and topology.peers is not None:
        about["processes"] = f"{len(names)}; this is {topology.peers.names[topology.peers.number]}"
    if topology.survivors is not None:
        about["after a death"] = "the survivors adopt its replicas, and repeat the step"
        about["replicas here"] = ", ".join(map(str, topology.survivors.replicas))
        names = None  # each process has one device of its own
    rows = []
    for number, of_replica in enumerate(topology.grid):
        row = [number, ", ".join(map(device_name, of_replica)), of_replica[0].device_kind]
        rows.append(row if names is None else [*row, names[of_replica[0].process_index]])
    head = ("replica", "devices", "kind", "process")[: 3 if names is None else 4]
    return html.page(
        f"{name}: {count:,} replica{'s' * (count != 1)}", html.facts(about), html.table(head, rows)
    )


def _kept_where(placement: Any) -> str:
    """Returns the placement of variables in words."""
    if placement.parameter_device is not None:
        return f"on {device_name(placement.parameter_device)}"
    layouts, places = placement.layouts, []
    if layouts is not None and layouts.mapped is not None:
        places.append("over the logical devices of each replica by the layout map")
    if layouts is not None and layouts.shards is not None:
        is_optimizer = layouts.shards.state is ShardState.OPTIMIZER
        what = "those of optimizers" if is_optimizer else "trainable ones, and those of optimizers"
        places.append(f"over {layouts.shards.num_shards} replicas: {what}")
    if not places:
        return "replicated on every device"
    return f"sharded {'; '.join(places)}; the others replicated on every device"

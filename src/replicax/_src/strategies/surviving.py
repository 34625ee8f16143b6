"""``MultiWorkerMirroredStrategy(fault_tolerance=...)``: its options and its topology."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from replicax._src.cluster.control_messages import security_of
from replicax._src.cluster.counters import counters
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import split_address
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.devices.jax_backend import local_devices
from replicax._src.devices.live_workers import not_for_survivors
from replicax._src.devices.named_devices import device_name
from replicax._src.devices.topology import Topology
from replicax._src.fault_tolerance.survivors import Survivors
from replicax._src.strategies.joining import join_survivors
from replicax._src.vocabulary.errors import InvalidArgumentError
from replicax._src.vocabulary.options import FaultToleranceOptions

log = logging.getLogger("replicax")


def checked_options(
    fault_tolerance: FaultToleranceOptions | bool, membership: Membership, **others: Any
) -> FaultToleranceOptions | None:
    """Returns the options of a strategy whose workers go on after a death; None if a death ends the job.

    Args:
      fault_tolerance: The argument of the strategy.
      others: Its arguments that divide state or replicas over devices, with their values.

    Raises:
      InvalidArgumentError: ``min_workers`` is larger than the number of tasks.
      UnsupportedError: State is divided, or a replica has several devices.
    """
    options, num_tasks = FaultToleranceOptions.of(fault_tolerance), membership.num_workers
    if options is None:
        return None
    if options.min_workers > num_tasks:
        raise InvalidArgumentError(
            f"rx.FaultToleranceOptions(min_workers={options.min_workers}): the cluster has {num_tasks} worker{'s' * (num_tasks > 1)}. Give at "
            f"most {num_tasks}."
        )
    for name, value in others.items():
        if value is not None and (value is True or value != 1):
            raise not_for_survivors(f"{name}={value!r:.100}")
    if num_tasks > 1:
        return options
    log.info("fault_tolerance has no effect in a cluster of one worker: nobody can adopt its replica.")
    return None


def join(membership: Membership, timeout_s: float, options: FaultToleranceOptions) -> Topology:
    """Makes this process one of the workers of a cluster, which go on when some die. Blocks until all have come.

    Args:
      timeout_s: The limit for later waits for other workers.

    Raises:
      UnsupportedError: This process has several devices, or another one than a CPU.
      ClusterStartError: A worker is missing, or the workers do not fit together.
      BackendStartedError: JAX was used before.
    """
    peers = join_survivors(membership, timeout_s, options.min_workers)
    devices = local_devices()
    check_devices(devices)
    if not _started:
        _started.append(_start(peers, membership, timeout_s))
    return Topology.of_survivors(devices[0], peers, membership.num_workers, _started[0])


_started: list[Survivors] = []  # the survivors of this process, which joins a cluster once


def _start(peers: Peers, membership: Membership, timeout_s: float) -> Survivors:
    host, _ = split_address(membership.addresses[membership.id_in_cluster])
    rendezvous = Rendezvous(host, security_of())
    survivors = Survivors(peers, rendezvous, membership.num_workers, timeout_s)
    counters.survivors = survivors.describe
    survivors.start()
    peers.at_end, peers.admission = survivors.finish, survivors
    return survivors


def check_devices(devices: Sequence[Any]) -> None:
    """Raises UnsupportedError unless a process has one CPU device."""
    names = ", ".join(map(device_name, devices))
    if devices[0].platform != "cpu":
        raise not_for_survivors(f"Training on {devices[0].platform.upper()} devices ({names})")
    if len(devices) > 1:
        raise not_for_survivors(f"A worker with several devices ({names})")

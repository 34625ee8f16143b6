"""Joins a cluster and starts JAX on its processes, once per process. All waits are bounded; errors name the tasks."""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import logging
import math
import os
import select
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, final

from replicax._src import jax_compat
from replicax._src.cluster.channel import EARLIER_RUN_S, Channel
from replicax._src.cluster.credentials import TOKEN_VARIABLE, Credentials, is_loopback
from replicax._src.cluster.environ import SILENCE_LIMIT, STALL_LIMIT, START_LIMIT, STUCK_LIMIT, limit_s
from replicax._src.cluster.failures import ClusterFailureError, ClusterStartError, PeerFailureError
from replicax._src.cluster.frames import ask, security_of
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.occupants import SILENT, describe_other_program
from replicax._src.cluster.peers import Peers, joined_peers, note_joined
from replicax._src.cluster.relay import Relay
from replicax._src.cluster.spec import split_address
from replicax._src.errors import BackendStartedError
from replicax._src.wire.errors import ForeignPeerError, TokenError
from replicax._src.wire.security import Security

log = logging.getLogger("replicax")
_SERVICE_START_S = 60.0
_SERVICE_LINGER_S = 30.0
_LAST_TO_LEAVE_S = 60.0
_REMINDER_S = 10.0
_POLL_S = 0.3
_ANSWER_S = 2.0
# A service that another process has just started listens before it answers.
_SILENT_S = 15.0
# A running service answers one of two pings within this time.
_LIVELY_S = 1.5
# Long enough for the controller, which names the missing tasks once a second.
_LEAST_WAIT_S = 3.0


@final
class _LiveCluster:
    """The membership of this process in a running cluster. It ends with the process."""

    def __init__(self, membership: Membership, timeout_s: float):
        self._service: subprocess.Popen[str] | None = None
        self._leader_address = membership.leader_address
        start_s = limit_s(os.environ, START_LIMIT)
        limits = {
            "silence_s": limit_s(os.environ, SILENCE_LIMIT),
            "stall_s": limit_s(os.environ, STALL_LIMIT),
        }
        deadline = time.monotonic() + start_s
        self._security = security_of()
        if (
            self._security.server is not None
            and Credentials.of_environment(os.environ).certificate_file is None
        ):
            raise ClusterStartError(
                "REPLICAX_TLS_CA is set without a certificate, which the controller beside worker 0 needs. Set "
                "REPLICAX_TLS_CERTIFICATE and REPLICAX_TLS_KEY too, on all tasks."
            )
        if membership.id_in_cluster == 0:
            _warn_without_token(membership.addresses)
            stuck_s = limit_s(os.environ, STUCK_LIMIT)
            of_controller = {**limits, "timeout_s": timeout_s, "stuck_s": stuck_s}
            self._service = _start_service(membership, of_controller, self._security, deadline)
        self._channel = Channel(membership, self._security, **limits)
        try:
            coordinator = self._channel.connect(deadline)["coordinator"]
            self.peers = Peers(self._channel, membership, timeout_s)
            _compare_versions(
                self._channel, self.peers.names, max(deadline - time.monotonic(), _LEAST_WAIT_S)
            )
            with Relay(coordinator) as relay:
                number, num_processes = self.peers.number, len(self.peers)
                jax_compat.join_processes(relay.address, num_processes, number, math.ceil(start_s))
            note_joined(self.peers)
        except BaseException as error:
            self._channel.give_up(_reason(error))
            self.close()
            raise
        self._say_errors()
        atexit.register(self.close)  # runs before JAX's own handler, which was registered first
        atexit.register(jax_compat.end_at_interrupt)

    def _say_errors(self) -> None:
        before = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            failure = self.peers.explain(error)
            if failure is not None:
                error.add_note(f"\nThe reason: {failure}")
            if isinstance(error, ClusterFailureError):
                self._channel.give_up(_reason(error))
            elif self._channel.failure_here is None:
                self._channel.tell_error("".join(traceback.format_exception(kind, error, trace)))
            before(kind, error, trace)

        sys.excepthook = excepthook

    def close(self) -> None:
        """Leaves the cluster. Process 0 leaves last."""
        atexit.unregister(self.close)
        jax_compat.leave_processes()
        self._channel.leave()
        service, self._service = self._service, None
        if service is None:
            return
        assert service.stdin is not None
        assert service.stdout is not None
        service.stdin.close()
        deadline = time.monotonic() + _LAST_TO_LEAVE_S
        while self._is_serving() and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(_POLL_S)
                break
        service.kill()
        service.wait()
        service.stdout.close()

    def _is_serving(self) -> bool:
        """Returns True if the service still runs, because other tasks may need it."""
        address = self._leader_address
        return not self._channel.is_lost and any(
            _ping(address, self._security, _LIVELY_S) is not None for _ in range(2)
        )


def _reason(error: BaseException) -> str:
    """Returns the reason why this process gives up, for the others."""
    is_ours = isinstance(error, ClusterFailureError)
    return str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()


def _warn_without_token(addresses: Sequence[str]) -> None:
    hosts = [split_address(address)[0] for address in addresses]
    if Credentials.of_environment(os.environ).admits_anybody and not all(map(is_loopback, hosts)):
        log.warning(
            "The job has no token: every program that can reach %s can join or end it. Set %s to the same secret on all "
            "tasks.",
            addresses[0],
            TOKEN_VARIABLE,
        )


def _compare_versions(channel: Channel, names: Sequence[str], timeout_s: float) -> None:
    """Waits until all tasks have started, and checks that their versions match."""
    versions = {
        "jax": jax_compat.VERSION,
        "python": ".".join(map(str, sys.version_info[:2])),
        "CPU collectives by": jax_compat.cpu_collectives(),
    }
    try:
        found = channel.gather(
            "start", versions, timeout_s, what="for all tasks to start", every_s=_REMINDER_S
        )
    except PeerFailureError as error:
        raise ClusterStartError(str(error)) from error
    for name, theirs in zip(names, found, strict=True):
        if theirs != found[0]:
            raise ClusterStartError(
                f"{names[0]} has {_listed(found[0])}, and {name} has {_listed(theirs)}: their compiled programs "
                "would differ. Install the same versions on all machines, and give all tasks the same JAX_ variables "
                "(mpirun -x passes one on)."
            )


def compare_devices(peers: Peers, devices: Sequence[Any]) -> None:
    """Checks that all processes have the same number and kind of devices.

    Raises:
      ClusterStartError: They differ.
    """
    found = peers.gather("devices", [len(devices), devices[0].platform], "to compare devices")
    if any(theirs != found[0] for theirs in found):
        have = ", ".join(
            f"{name} has {count} of {platform}"
            for name, (count, platform) in zip(peers.names, found, strict=True)
        )
        raise ClusterStartError(
            f"Every worker must have the same number of devices, of one kind: {have}. Give each process the same "
            "(CUDA_VISIBLE_DEVICES, replicax.config.set_local_devices, replicax launch --devices-per-worker)."
        )


def _listed(versions: dict[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _start_service(
    membership: Membership, limits: Mapping[str, float], security: Security, deadline: float
) -> subprocess.Popen[str]:
    """Starts the service, as soon as the service of an earlier run has left the address."""
    names, address = membership.names, membership.leader_address
    settings = {
        "address": address,
        "names": names,
        "cluster": membership.described,
        "limits": dict(limits),
        "linger_s": _SERVICE_LINGER_S,
    }
    is_first, hint = True, "Or the address belongs to another machine. "
    while True:
        process, answer = _try_service(settings)
        if "coordinator" in answer:
            return process
        reason = answer.get("error", "it said nothing")
        if answer.get("errno") != errno.EADDRINUSE:
            break
        occupant = _occupant(membership, security, deadline, is_first=is_first)
        if occupant is not None:
            reason, hint = f"{reason}: {occupant}", ""
            break
        is_first = False
    raise ClusterStartError(
        f"{names[0]} cannot listen at its own address {address}: {reason}. {hint}Choose another port in TF_CONFIG, on all "
        "tasks."
    )


def _try_service(settings: Mapping[str, Any]) -> tuple[subprocess.Popen[str], dict[str, Any]]:
    """Starts the service process. Returns it with its answer. It has ended if the answer has no coordinator address."""
    root = str(Path(__file__).parents[3])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    # It gets its own session: Ctrl-C goes to the tasks, and the service must outlive them.
    process = subprocess.Popen(
        [sys.executable, "-m", "replicax._src.cluster.service"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(settings) + "\n")
    process.stdin.flush()
    poll = select.poll()
    poll.register(process.stdout, select.POLLIN)
    has_answered = poll.poll(1000 * _SERVICE_START_S)
    answer = json.loads(process.stdout.readline() or "{}") if has_answered else {}
    if "coordinator" not in answer:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()
    return process, answer


def _occupant(membership: Membership, security: Security, deadline: float, *, is_first: bool) -> str | None:
    """Waits while an earlier run of this cluster is ending at the leader's address.

    Args:
      is_first: True if no attempt was made before. If no process listens then, the earlier run may just have ended.

    Returns:
      None if an earlier run was there and has ended in time; otherwise the program that listens there, in words.

    Raises:
      ClusterStartError: Another process is the same task of this cluster.
    """
    started = reminded = time.monotonic()
    was_there = False
    address = membership.leader_address
    while True:
        now = time.monotonic()
        try:
            answer = ask(address, {"kind": "ping"}, security, _ANSWER_S)
            if answer.get("cluster") != membership.described:
                other = answer.get("cluster")
                return f"another job of replicax listens there ({other or 'not at its controller'})"
            if answer.get("is_ending") is not True:
                raise _is_twin(membership, security)
            was_there = True
        except TokenError as error:  # an earlier run may have another token
            if now - started >= EARLIER_RUN_S:
                return f"another job of replicax listens there, and its token is not that of this process ({error})"
            was_there = True
        except ForeignPeerError as error:
            return f"{error}; {describe_other_program(address, _ANSWER_S)}"
        except TimeoutError:
            if was_there:
                return None
            program = describe_other_program(address, _ANSWER_S)  # a service that is starting is silent too
            if program != SILENT or now - started >= _SILENT_S:
                return program
        except OSError as error:
            if was_there or (is_first and isinstance(error, ConnectionRefusedError)):
                return None
            return describe_other_program(address, _ANSWER_S)
        if now >= deadline:
            return "an earlier run of this job is still ending there"
        if was_there and now - reminded >= _REMINDER_S:
            reminded = now
            log.warning(
                "%s has been waiting %.0f s for the other tasks of an earlier run to end: its service is still at %s.",
                membership.names[0],
                now - started,
                address,
            )
        time.sleep(_POLL_S)


def _is_twin(membership: Membership, security: Security) -> ClusterStartError:
    """Tells the controller of a process that is the same task, and returns the error for this process."""
    address, name = membership.leader_address, membership.names[0]
    twin = {"kind": "twin", "member": membership.id_in_cluster, "cluster": membership.described}
    with contextlib.suppress(OSError):
        ask(address, twin, security, _ANSWER_S)
    return ClusterStartError(
        f"Another process is already {name} of this cluster, at {address}. Each task of the cluster is one process; give each "
        'its own index, in "task" of TF_CONFIG.'
    )


def _ping(address: str, security: Security, timeout_s: float) -> dict[str, Any] | None:
    """Returns the answer of the controller at an address; None if it does not answer in time."""
    try:
        return ask(address, {"kind": "ping"}, security, timeout_s)
    except OSError:
        return None


_lock = threading.Lock()


def join_cluster(membership: Membership, timeout_s: float = 600.0) -> Peers:
    """Joins a cluster. A second call returns the cluster that this process has joined.

    Args:
      membership: The workers, which meet at the leader's address, and the task of this process.
      timeout_s: The longest wait for processes that are behind, later. The value of the first call counts.

    Raises:
      BackendStartedError: JAX's backend has already started.
      ClusterStartError: A task is missing, or the tasks do not match.
      ClusterFailureError: A task ended meanwhile.
    """
    with _lock:
        peers = joined_peers()
        if peers is not None:
            if (peers.cluster, peers.number) != (membership.described, membership.id_in_cluster):
                raise ClusterStartError(
                    f"This process is already {peers.names[peers.number]} of a cluster, and cannot be {membership.task} of "
                    "another. Do not change TF_CONFIG while the process runs."
                )
            peers.check()
            return peers
        if jax_compat.backend_started():
            raise BackendStartedError(
                "Collective ops must be configured at program startup: JAX's backend has started, so this process can no "
                "longer join a cluster. Make the strategy before anything uses JAX: before the first array, the first model."
            )
        return _LiveCluster(membership, timeout_s).peers

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

from replicax._src.cluster.channel import EARLIER_RUN_S, Channel
from replicax._src.cluster.chief import follow_leader
from replicax._src.cluster.control_messages import ask, security_of
from replicax._src.cluster.credentials import TOKEN_VARIABLE, Credentials, is_loopback
from replicax._src.cluster.environ import (
    FAILURE_SAVE_LIMIT,
    SILENCE_LIMIT,
    STALL_LIMIT,
    START_LIMIT,
    STUCK_LIMIT,
    limit_s,
)
from replicax._src.cluster.failures import ClusterFailureError, ClusterStartError, PeerFailureError
from replicax._src.cluster.machine_layout import REPLACEMENT_VARIABLE
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.occupants import SILENT, describe_other_program
from replicax._src.cluster.peers import Peers, joined_peers, note_joined
from replicax._src.cluster.relay import Relay
from replicax._src.cluster.spec import split_address
from replicax._src.cluster.task_versions import check_versions, versions
from replicax._src.jax_internals import jax_compat
from replicax._src.vocabulary.errors import BackendStartedError
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
# The time within which the controller of a running job learns of the death of a process on its own machine.
_DEATH_S = 5.0
# The time within which the controller of a running job answers.
_REPLACEMENT_START_S = 30.0
# Long enough for the controller, which names the missing tasks once a second.
_LEAST_WAIT_S = 3.0


@final
class _LiveCluster:
    """The membership of this process in a running cluster. It ends with the process."""

    def __init__(self, membership: Membership, timeout_s: float, min_workers: int | None = None):
        self._service: subprocess.Popen[str] | None = None
        self._is_tolerant, self._has_failed = min_workers is not None, False
        self._leader_address = membership.leader_address
        start_s = limit_s(os.environ, START_LIMIT)
        is_replacement = os.environ.get(REPLACEMENT_VARIABLE) == "1"
        if is_replacement:
            start_s = min(start_s, _REPLACEMENT_START_S)
        limits = {
            "silence_s": limit_s(os.environ, SILENCE_LIMIT),
            "stall_s": limit_s(os.environ, STALL_LIMIT),
        }
        deadline = time.monotonic() + start_s
        self._security = security_of()
        if (
            self._security.server is not None
            and Credentials.from_environment(os.environ).certificate_file is None
        ):
            raise ClusterStartError(
                "REPLICAX_TLS_CA is set without a certificate, which the controller beside worker 0 needs. Set "
                "REPLICAX_TLS_CERTIFICATE and REPLICAX_TLS_KEY too, on all tasks."
            )
        if membership.id_in_cluster == 0 and not is_replacement:
            _warn_without_token(membership.addresses)
            stuck_s = limit_s(os.environ, STUCK_LIMIT)
            save_s = limit_s(os.environ, FAILURE_SAVE_LIMIT)
            of_controller = {**limits, "timeout_s": timeout_s, "stuck_s": stuck_s, "save_s": save_s}
            self._service = _start_service(
                membership, of_controller, self._security, deadline, is_tolerant=self._is_tolerant
            )
        self._channel = Channel(membership, self._security, min_workers=min_workers, **limits)
        try:
            welcome = self._channel.connect(deadline)
            self.peers = Peers(self._channel, membership, timeout_s)
            if self._channel.is_newcomer:
                log.info("%s", _replaces(membership))
            else:  # the member that gives a newcomer the state compares
                _compare_versions(self._channel, max(deadline - time.monotonic(), _LEAST_WAIT_S))
            if self._is_tolerant:
                follow_leader(lambda: self.peers.is_leader)
            else:
                with Relay(welcome["coordinator"]) as relay:
                    number, num_processes = self.peers.number, len(self.peers)
                    jax_compat.join_processes(relay.address, num_processes, number, math.ceil(start_s))
            note_joined(self.peers)
        except BaseException as error:
            self._has_failed = True
            self._channel.give_up(_reason(error))
            self.close()
            raise
        self._say_errors()
        atexit.register(self.close)  # runs before JAX's own handler, which was registered first
        atexit.register(jax_compat.end_at_interrupt)

    def _say_errors(self) -> None:
        before = sys.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: Any) -> None:
            self._has_failed = True
            failure = self.peers.explain(error)
            if failure is not None:
                error.add_note(f"\nThe reason: {failure}")
            if isinstance(error, ClusterFailureError):
                self._channel.give_up(_reason(error))
            elif self._channel.failure_here is None:
                self._channel.report_error("".join(traceback.format_exception(kind, error, trace)))
            before(kind, error, trace)

        sys.excepthook = excepthook

    def close(self) -> None:
        """Leaves the cluster. Process 0 leaves last, unless failures are tolerated and it ends with an error."""
        atexit.unregister(self.close)
        if self._is_tolerant and not self._has_failed and self._channel.failure is None:
            if self.peers.exit_inside_of_loop is None:
                self._agree_on_end()
            else:
                self._leave_early(self.peers.exit_inside_of_loop)
        jax_compat.leave_processes()
        self._channel.leave()
        self._end_service()

    def _leave_early(self, error: SystemExit) -> None:
        """Leaves without the others, which adopt this process's replicas. A code other than 0 is an error."""
        self._has_failed = True
        if error.code not in (None, 0):
            self._channel.report_error(f"SystemExit: {error.code}")

    def _agree_on_end(self) -> None:
        try:
            self.peers.end()
        except Exception as error:
            self._has_failed = True
            log.exception("The tasks have not ended together.")
            self._channel.give_up(_reason(error))
            jax_compat.end_beside_programs(1)

    def _end_service(self) -> None:
        """Waits until the other tasks do not need the service any more. If failures are tolerated, it outlives this
        process for as long as they need it.
        """
        service, self._service = self._service, None
        if service is None:
            return
        assert service.stdin is not None
        assert service.stdout is not None
        service.stdin.close()
        if self._is_tolerant and (self._has_failed or self._channel.failure is not None):
            _left_behind.append(service)
            return
        deadline = time.monotonic() + _LAST_TO_LEAVE_S
        while self._is_serving() and time.monotonic() < deadline:
            with contextlib.suppress(subprocess.TimeoutExpired):
                service.wait(_POLL_S)
                break
        if self._is_tolerant and service.poll() is None:
            _left_behind.append(service)
            return
        service.kill()
        service.wait()
        service.stdout.close()

    def _is_serving(self) -> bool:
        """Returns True if the service still runs, because other tasks may need it."""
        address = self._leader_address
        return not self._channel.is_lost and any(
            _ping(address, self._security, _LIVELY_S) is not None for _ in range(2)
        )


_left_behind: list[subprocess.Popen[str]] = []  # services that still run, so that nothing ends them or warns


class _JobRuns(Exception):
    """The job runs, without worker 0. This process is its replacement, and the controller is there."""


def _replaces(membership: Membership) -> str:
    me = membership.names[membership.id_in_cluster]
    return (
        f"{me} of this job is gone, and the others continue. This process replaces it: it gets the state from them where it "
        "restores a checkpoint."
    )


def _reason(error: BaseException) -> str:
    """Returns the reason why this process gives up, for the others."""
    is_ours = isinstance(error, ClusterFailureError)
    return str(error) if is_ours else "".join(traceback.format_exception_only(error)).strip()


def _warn_without_token(addresses: Sequence[str]) -> None:
    hosts = [split_address(address)[0] for address in addresses]
    if Credentials.from_environment(os.environ).admits_anybody and not all(map(is_loopback, hosts)):
        log.warning(
            "The job has no token: every program that can reach %s can join or end it. Set %s to the same secret on all "
            "tasks.",
            addresses[0],
            TOKEN_VARIABLE,
        )


def _compare_versions(channel: Channel, timeout_s: float) -> None:
    """Waits until all tasks have started, and checks that their versions match."""
    try:
        found = channel.gather(
            "start", versions(), timeout_s, what="for all tasks to start", every_s=_REMINDER_S
        )
    except PeerFailureError as error:
        raise ClusterStartError(str(error)) from error
    check_versions(found.named())


def compare_devices(peers: Peers, devices: Sequence[Any]) -> None:
    """Checks that all processes have the same number and kind of devices.

    Raises:
      ClusterStartError: They differ.
    """
    found = peers.gather("devices", [len(devices), devices[0].platform], "to compare devices")
    if any(theirs != found[0] for theirs in found):
        have = ", ".join(
            f"{name} has {count} of {platform}"
            for name, (count, platform) in zip(found.names, found, strict=True)
        )
        raise ClusterStartError(
            f"Every worker must have the same number of devices, of one kind: {have}. Give each process the same "
            "(CUDA_VISIBLE_DEVICES, replicax.config.set_local_devices, replicax launch --devices-per-worker)."
        )


def _start_service(
    membership: Membership,
    limits: Mapping[str, float],
    security: Security,
    deadline: float,
    *,
    is_tolerant: bool = False,
) -> subprocess.Popen[str] | None:
    """Starts the service, as soon as the service of an earlier run has left the address. Returns None if the job runs
    already, with its own: then this process replaces one that is gone.
    """
    names, address = membership.names, membership.leader_address
    settings = {
        "address": address,
        "names": names,
        "cluster": membership.described,
        "limits": dict(limits),
        "linger_s": _SERVICE_LINGER_S,
        "is_tolerant": is_tolerant,
    }
    is_first, hint = True, "Or the address belongs to another machine. "
    while True:
        process, answer = _try_service(settings)
        if "coordinator" in answer:
            return process
        reason = answer.get("error", "it said nothing")
        if answer.get("errno") != errno.EADDRINUSE:
            break
        try:
            occupant = _occupant(membership, security, deadline, is_first=is_first)
        except _JobRuns:
            return None
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
        [sys.executable, "-m", "replicax._src.cluster.controller_process"],
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
      _JobRuns: It was, and the others continue without it.
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
                if answer.get("epoch") and membership.id_in_cluster not in answer.get("members", ()):
                    raise _JobRuns
                if not answer.get("epoch") or now - started >= _DEATH_S:
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


def join_cluster(
    membership: Membership, timeout_s: float = 600.0, *, min_workers: int | None = None
) -> Peers:
    """Joins a cluster. A second call returns the cluster that this process has joined.

    Args:
      membership: The workers, which meet at the leader's address, and the task of this process.
      timeout_s: The longest wait for processes that are behind, later. The value of the first call counts.
      min_workers: If the live processes continue after a failure: the fewest with which they do. This process then
        stays alone for JAX, and the caller makes the first epoch.

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
            if peers.min_workers != min_workers:
                raise ClusterStartError(
                    f"This process has joined its cluster {_mode(peers.min_workers)}, and cannot be a part of it "
                    f"{_mode(min_workers)} too. Give all strategies of a program the same `fault_tolerance`."
                )
            peers.check()
            return peers
        if jax_compat.backend_started():
            raise BackendStartedError(
                "Collective ops must be configured at program startup: JAX's backend has started, so this process can no "
                "longer join a cluster. Make the strategy before anything uses JAX: before the first array, the first model."
            )
        return _LiveCluster(membership, timeout_s, min_workers).peers


def _mode(min_workers: int | None) -> str:
    return "without fault tolerance" if min_workers is None else f"with min_workers={min_workers}"

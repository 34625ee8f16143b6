"""``JobServers``: the parameter servers' side of a job: one watch for each server, and the rules of restarts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

from replicax._ps.job.server_recovery import ServerRecovery
from replicax._ps.job.server_side import JobHooks
from replicax._ps.job.server_state import ServerState
from replicax._ps.job.server_watch import RestartRules, ServerWatch
from replicax._ps.job.setup import Setup
from replicax._ps.job.snapshots_together import SnapshotsTogether
from replicax._ps.job.two_copies import TwoCopies
from replicax._src.program_kit.errors import InvalidArgumentError


@final
class JobServers:
    """Watches each parameter server, and decides what the job does when one is silent, lost, restarted or back.

    Args:
      job: The job.
      instances: The instances of the servers' processes that have the variables, in order: those that answered the
        session's ``hello``, or the ``instances`` of the session's last job.
      first_epoch: The number of the first epoch of snapshots: ``next_epoch`` of the session's last job.

    Raises:
      InvalidArgumentError: ``on_ps_restart`` does not fit the servers.
    """

    def __init__(self, job: JobHooks, instances: Sequence[str], first_epoch: int = 1):
        setup = job.setup
        check_on_ps_restart(setup)
        self._job = job
        comes_back = [0.0 if s is None else setup.limits.reconnect_s for s in setup.snapshot_intervals_s]
        self._together = self._copies = None
        rules: RestartRules
        if setup.groups is not None:
            rules = self._copies = TwoCopies(job, setup.groups, min(comes_back))
            comes_back = [0.0] * setup.num_servers
        elif setup.on_ps_restart == "rewind":
            rules = self._together = SnapshotsTogether(job, first_epoch)
        else:
            rules = ServerRecovery(job)
        self._rules, self._first_epoch = rules, first_epoch
        self._watches = [
            ServerWatch(ServerState(index, instance, comes_back_s), job, rules)
            for index, (instance, comes_back_s) in enumerate(zip(instances, comes_back, strict=True))
        ]
        if self._together is not None:
            self._together.watch(self._watches)

    def start(self, now: float) -> None:
        """Starts the heartbeats."""
        self._rules.start()
        for watch in self._watches:
            watch.start()

    def close(self) -> None:
        """Does nothing: the job has stopped the procedures."""

    def note_failure(self, task: str | None, now: float) -> bool:
        """Handles a function or a round that could not use a parameter server; None if it is unknown which.

        Returns True if the server or its other copy may come back. The function is then retried more often.
        """
        any_of = task is None or self._copies is not None
        failed = [watch for watch in self._watches if any_of or watch.name == task]
        for watch in failed:
            watch.pause()  # until the server has answered, so that no function is tried in vain
            watch.probe()
        return self._copies is not None or any(watch.state.comes_back_s for watch in failed)

    def statistics(self) -> dict[str, Any]:
        """Returns ``ps``, the statistics of each parameter server by name, and ``replication``, which may be None."""
        return {
            "ps": {watch.name: watch.state.statistics() for watch in self._watches},
            "replication": None if self._copies is None else self._copies.statistics(),
        }

    def primaries_for_workers(self) -> Sequence[Mapping[str, Any]] | None:
        """Returns the views that workers are told; None without groups."""
        return None if self._copies is None else self._copies.described_views()

    @property
    def instances(self) -> list[str]:
        """The instances of the processes that have the variables, for the next job of the session."""
        return [watch.state.instance for watch in self._watches]

    @property
    def next_epoch(self) -> int:
        """The number of the next epoch of snapshots, for the next job of the session."""
        return self._first_epoch if self._together is None else self._together.next_epoch

    @property
    def last_epoch(self) -> int:
        """The last epoch of which all servers have a snapshot, for the ``Setup`` of the session's next job."""
        return self._job.setup.last_epoch if self._together is None else self._together.last


def check_on_ps_restart(setup: Setup) -> None:
    """Raises InvalidArgumentError if ``on_ps_restart`` is unknown, or does not fit the servers."""
    how = setup.on_ps_restart
    if how not in ("continue", "rewind"):
        raise InvalidArgumentError(f"on_ps_restart must be 'continue' or 'rewind', got {how!r}.")
    without = [n for n, interval in enumerate(setup.snapshot_intervals_s) if interval is None]
    if how == "rewind" and setup.groups is not None:
        raise InvalidArgumentError(
            "on_ps_restart='rewind' takes all parameter servers back to snapshots that they took "
            "together, but with replication=2 each group has snapshots of its own. Use "
            "on_ps_restart='continue', or remove replication=2."
        )
    if how == "rewind" and without:
        raise InvalidArgumentError(
            f"on_ps_restart='rewind' needs snapshots of all parameter servers, and "
            f"{', '.join(f'ps {n}' for n in without)} "
            "takes none. Start it with snapshot_dir in its rx.ServerOptions, or with --snapshot-dir."
        )

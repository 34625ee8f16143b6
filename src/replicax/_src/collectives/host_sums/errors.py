"""The error of a world that has ended. The members of the job catch it, and agree on the next epoch."""

from __future__ import annotations

from typing import final


@final
class EpochEnded(Exception):
    """The world of an epoch has ended: a member has died, or was given up, or the controller has ended the epoch.

    All causes are one event. The exchange that was under way has no result here; another member may have one.

    Attributes:
      epoch: The epoch.
      reason: The cause, for the log.
      lost: The number of the member that this process lost; None if it has lost none itself.
      blamed: ``lost``, if that member did not answer in time or could not be reached. None if a connection with it has
        ended, because it may have ended it for the same reason.
    """

    def __init__(self, epoch: int, reason: str, lost: int | None = None, blamed: int | None = None):
        super().__init__(f"Epoch {epoch} has ended: {reason}.")
        self.epoch, self.reason, self.lost, self.blamed = epoch, reason, lost, blamed

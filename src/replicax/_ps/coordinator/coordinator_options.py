"""``CoordinatorOptions``: the validated options of a ClusterCoordinator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

from replicax._ps.job.setup import OnPsRestart
from replicax._src.program_kit.cluster_tasks import ServerSettings
from replicax._src.program_kit.errors import InvalidArgumentError


@final
@dataclass(frozen=True)
class CoordinatorOptions:
    """The options of ``ClusterCoordinator``. A strategy's coordinator is returned again only for equal options.

    Raises:
      InvalidArgumentError: An option has a wrong type or value.
    """

    max_staleness: int | None
    replicas_to_aggregate: int | None
    reconnect_timeout_s: float
    on_ps_restart: OnPsRestart
    status_address: str | None

    def __post_init__(self) -> None:
        for name, least, none in (
            ("max_staleness", 0, "for no limit"),
            ("replicas_to_aggregate", 1, "to train asynchronously"),
        ):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InvalidArgumentError(
                    f"{name} must be a whole number of at least {least}, or None {none}; got {value!r}."
                )
        timeout_s, address = self.reconnect_timeout_s, self.status_address
        if not isinstance(timeout_s, int | float) or not timeout_s >= 0:
            raise InvalidArgumentError(
                f"reconnect_timeout_s must be a number of seconds, at least 0; got {timeout_s!r}."
            )
        if not isinstance(address, str | None):
            raise InvalidArgumentError(
                f'status_address must be "host:port", such as "127.0.0.1:8080", got {address!r}.'
            )
        object.__setattr__(self, "status_address", address or ServerSettings().status_address)

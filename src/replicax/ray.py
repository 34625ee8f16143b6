"""Trainings on Ray: ``rx.ray``. Ray is imported when one of the names is asked for."""

import importlib
from typing import TYPE_CHECKING, Any

from replicax._src.public_names import missing_name, publish, publish_all

if TYPE_CHECKING:
    from replicax._src.ray.servers import parameter_servers
    from replicax._src.ray.training import ReplicaxConfig, fit, report

__all__ = ["ReplicaxConfig", "fit", "parameter_servers", "report"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise missing_name(__name__, name)
    place = "servers" if name == "parameter_servers" else "training"
    return publish(__name__, name, getattr(importlib.import_module(f"replicax._src.ray.{place}"), name))


__dir__ = publish_all(globals())

"""Stand-ins for clusters and TPUs in the process of ``replicax plan``, where no other task and no TPU exists.

A plan covers one step on the devices of a topology, whichever task owns them. So the script gets its strategy at once,
with this task alone. Virtual devices stand for the cores of a TPU, as many as the topology has, so that the script sees
the right number of replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from replicax._ps.strategy.parameter_server import ParameterServerStrategy
from replicax._src.cluster import tpu
from replicax._src.cluster.resolver import ClusterResolver, SimpleClusterResolver, is_one_task
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.tpu import TPUClusterResolver
from replicax._src.devices.hardware import hardware_of
from replicax._src.devices.jax_backend import set_local_devices
from replicax._src.jax_internals import jax_compat
from replicax._src.strategies.multi_worker_mirrored import MultiWorkerMirroredStrategy
from replicax._src.strategies.tpu_system import TPUSystem
from replicax._src.vocabulary.errors import UnsupportedError

if TYPE_CHECKING:
    from replicax._src.strategies.strategy import Strategy

# More virtual devices would be slow. A script that needs all cores of a larger slice sets them itself.
_MOST_CORES: Final = 64
_CORES_OF_A_HOST: Final = 8

_Say = Callable[[str], None]


def stand_in_for_clusters(topology: str, say: _Say) -> None:
    """Replaces the functions that would wait for other tasks or for TPUs.

    Args:
      topology: The topology of the plan.
      say: Shows a message about each stand-in.
    """
    replace_method(MultiWorkerMirroredStrategy, "__init__", functools.partial(_alone, say=say))
    replace_method(ParameterServerStrategy, "__init__", _refused)
    hardware = hardware_of(topology)
    if hardware.chip.kind != "gpu":
        tpu.has_tpu = lambda: True
    of, num_devices = TPUSystem.of, hardware.num_devices
    TPUSystem.of = functools.partial(_virtual, of, num_devices=num_devices, say=say)


def replace_method(owner: Any, name: str, replacement: Callable[..., Any]) -> None:
    """Replaces a method of a class by a function that takes the original method, then its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, instance, *args, **kwargs)

    setattr(owner, name, method)


def _alone(
    original: Callable[..., None],
    strategy: Strategy,
    cluster_resolver: ClusterResolver | None = None,
    *args: Any,
    say: _Say,
    **kwargs: Any,
) -> None:
    del cluster_resolver
    original(strategy, SimpleClusterResolver(ClusterSpec({})), *args, **kwargs)
    say(
        "the script runs as one worker, and does not wait for the other workers of MultiWorkerMirroredStrategy. Its step is "
        "planned for all devices of the topology. Each gets as many rows as a device here; --global-batch sets the total."
    )


def _refused(original: Callable[..., None], strategy: Strategy, *args: Any, **kwargs: Any) -> None:
    del original, args, kwargs
    raise UnsupportedError(
        f"{type(strategy).__name__} keeps its variables on parameter servers, but a plan covers only devices that compute. Plan the "
        "step with rx.MirroredStrategy."
    )


def _virtual(
    original: Callable[[Any], TPUSystem], resolver: Any, *, num_devices: int, say: _Say
) -> TPUSystem:
    if not isinstance(resolver, TPUClusterResolver):
        return original(resolver)
    if not jax_compat.backend_started() and not jax_compat.has_several_cpu_devices():
        count = num_devices if num_devices <= _MOST_CORES else _CORES_OF_A_HOST
        set_local_devices(count)
        rows = f" Each of the {num_devices} gets as many rows as one of these; --global-batch sets the total."
        say(
            f"{count} virtual device(s) stand for the TPU's cores while the script runs.{rows if count < num_devices else ''}"
        )
    is_here = is_one_task(resolver.cluster_spec()) and not resolver.needs_tpu
    return original(resolver if is_here else TPUClusterResolver("local"))

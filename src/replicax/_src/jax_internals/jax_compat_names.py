"""Lists the names of JAX that ``jax_compat.py`` uses, most of them private, and checks that this JAX has them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import jax
import jaxlib.version

from replicax._src.packaging.version import __version__
from replicax._src.vocabulary.errors import JaxVersionError

# The names by module; tests/test_jax_compat.py compares them with jax_compat.py. Each private name has its purpose, and
# the issue of JAX that would replace it, or the feature to request. jax 0.10 to 0.12 need all of them.
NAMES: Final[Mapping[str, Sequence[str]]] = {
    "jax": (
        "Array",
        "Device",
        "ShapeDtypeStruct",
        "block_until_ready",
        "config.jax_compilation_cache_check_contents",
        "config.jax_compilation_cache_max_size",
        "config.jax_cpu_collectives_implementation",
        "config.jax_num_cpu_devices",
        "config.jax_persistent_cache_min_compile_time_secs",
        "config.jax_use_shardy_partitioner",
        "config.update",
        "config.values",
        "device_put",
        "distributed.initialize",
        "dtypes.extended",
        "ensure_compile_time_eval",
        "errors.JaxRuntimeError",
        "grad",
        "jit",
        "jvp",
        "lax.axis_index",
        "lax.with_sharding_constraint",
        "local_devices",
        "make_array_from_single_device_arrays",
        "make_jaxpr",
        "make_user_context",
        "random.key_data",
        "random.key_impl",
        "random.wrap_key_data",
        "shard_map",
        "sharding.NamedSharding",
        "sharding.PartitionSpec.UNCONSTRAINED",
        "sharding.SingleDeviceSharding",
        "sharding.use_abstract_mesh",
        "typeof",
        "vmap",
    ),
    "jax._src.core": (
        # jax.set_mesh in the middle of a trace, for Keras's variables with a layout.
        "top_axis_env",  # no upstream issue: jax.set_mesh inside jax.ensure_compile_time_eval
        "trace_ctx",  # no upstream issue: the same
        # Each launch looks at the current trace: jax.extend.core.take_current_trace changes it, and takes 2 µs.
        "trace_ctx.trace",  # no upstream issue: read the current trace
    ),
    "jax._src.distributed": (
        # Gives the number of a process before its backend starts, and drops the client of a service that is gone.
        "global_state",  # no upstream issue: a public number, and a way to drop the client
    ),
    "jax._src.interpreters.pxla": (
        # Makes the arrays of a batch: make_array_from_callback takes 15 to 25 µs more for each, device_put 90.
        "batched_device_put",  # no upstream issue: a fast way to make an array from one host array per device
    ),
    "jax._src.tree_util": (),  # jax_compat.take_as_arrays looks up names in it, and works without them
    "jax._src.xla_bridge": (
        # Options that a backend reads at its start cause errors, or have no effect, afterwards.
        "backends_are_initialized",  # jax#23320, open: tell whether JAX is initialized
    ),
    "jax.core": ("ShapedArray", "Trace", "Tracer", "eval_context"),
    "jax.export": ("export",),
    "jax.extend.core": (
        "ClosedJaxpr",
        "DropVar",
        "Jaxpr",
        "Literal",
        "Primitive",
        "jaxpr_as_fun",
        "set_current_trace",
    ),
    "jax.extend.source_info_util": ("current_name_stack", "register_exclusion", "user_context"),
    "jax.interpreters.ad": ("deflinear2", "instantiate_zeros", "primitive_jvps"),
    "jax.interpreters.batching": ("defvectorized", "primitive_batchers"),
    "jax.interpreters.mlir": ("lower_fun", "register_lowering"),
    "jax.interpreters.partial_eval": ("dce_jaxpr",),
    "jax.numpy": ("bfloat16", "copy", "issubdtype"),
    "jaxlib.xla_client": ("make_cpu_client",),
}


def check_names() -> None:
    """Checks that JAX has all of these names.

    Raises:
      JaxVersionError: JAX lacks a name.
    """
    missing = [dotted for module, names in NAMES.items() for dotted in _missing(module, names)]
    if missing:
        raise JaxVersionError(
            f"replicax {__version__} does not work with jax {jax.__version__} and jaxlib {jaxlib.version.__version__}: it uses "
            f"{', '.join(missing)}, which this JAX does not have. Install a version of JAX that this replicax was tested with "
            "(its README names them), or a newer replicax."
        )


def _missing(module: str, names: Sequence[str]) -> list[str]:
    try:
        found = importlib.import_module(module)
    except ImportError:
        return [module]
    return [f"{module}.{name}" for name in names if not _has(found, name)]


def _has(module: Any, name: str) -> bool:
    try:
        reduce(getattr, name.split("."), module)
    except AttributeError:
        return False
    return True

"""The names of JAX that ``jax_compat.py`` uses, most of them private, and the check that this version of JAX has
them.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from functools import reduce
from typing import Any, Final

import jax
import jaxlib.version

from replicax._src.errors import JaxVersionError
from replicax._src.version import __version__

# By module. tests/test_jax_compat.py compares them with what jax_compat.py says. What it does without is not here.
NAMES: Final[Mapping[str, Sequence[str]]] = {
    "jax": (
        "Array",
        "Device",
        "ShapeDtypeStruct",
        "config.jax_compilation_cache_check_contents",
        "config.jax_compilation_cache_max_size",
        "config.jax_cpu_collectives_implementation",
        "config.jax_num_cpu_devices",
        "config.jax_persistent_cache_min_compile_time_secs",
        "config.update",
        "device_put",
        "distributed.initialize",
        "dtypes.canonicalize_dtype",
        "dtypes.extended",
        "ensure_compile_time_eval",
        "errors.JaxRuntimeError",
        "jit",
        "lax.with_sharding_constraint",
        "local_devices",
        "make_array_from_single_device_arrays",
        "make_jaxpr",
        "process_index",
        "shard_map",
        "sharding.NamedSharding",
        "sharding.PartitionSpec.UNCONSTRAINED",
        "sharding.use_abstract_mesh",
        "typeof",
    ),
    "jax._src.config": (
        "config_ext.unset",
        "config_states.values",
        "persistent_cache_min_compile_time_secs",
    ),
    "jax._src.core": (
        "ExtendAxisEnvNdContextManager",
        "NamedAxisEffect",
        "Trace",
        "eval_trace.stage_value",
        "extend_axis_env_nd",
        "top_axis_env",
        "trace_ctx",
        "update_aval_with_sharding",
    ),
    "jax._src.distributed": ("global_state",),
    "jax._src.interpreters.partial_eval": ("DynamicJaxprTrace", "dce_jaxpr"),
    "jax._src.interpreters.pxla": ("batched_device_put",),
    "jax._src.sharding_impls": ("SPMDAxisContext",),
    "jax._src.source_info_util": ("register_exclusion", "user_frames"),
    "jax._src.tree_util": (),
    "jax._src.xla_bridge": ("backends_are_initialized",),
    "jax.core": ("ShapedArray", "Tracer"),
    "jax.export": ("export",),
    "jax.extend.core": (
        "ClosedJaxpr",
        "DropVar",
        "Jaxpr",
        "Literal",
        "Primitive",
        "Var",
        "jaxpr_as_fun",
        "set_current_trace",
        "take_current_trace",
    ),
    "jax.extend.source_info_util": ("current", "current_name_stack", "user_context"),
    "jax.interpreters.ad": ("deflinear2", "instantiate_zeros", "primitive_jvps"),
    "jax.interpreters.batching": ("defvectorized", "primitive_batchers"),
    "jax.interpreters.mlir": ("lower_fun", "register_lowering"),
    "jax.numpy": ("copy", "issubdtype"),
    "jaxlib.xla_client": ("make_cpu_client",),
}


def check_names() -> None:
    """Checks that JAX has all of them.

    Raises:
      JaxVersionError: It does not.
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

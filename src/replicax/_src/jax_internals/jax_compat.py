"""The only file besides ``coordination.py`` that depends on JAX's version or its private names.

It holds small functions with stable meanings for the rest of replicax.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import math
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from replicax._src.jax_internals.jax_compat_names import check_names

check_names()  # a failed import below would name one name, and no version

import jax
import jax.core
import jax.export
import jax.extend.core as jex
import jax.numpy as jnp
import numpy as np
from jax._src import core as _private_core
from jax._src import distributed as _distributed
from jax._src import tree_util as _tree_util
from jax._src import xla_bridge as _xla_bridge
from jax._src.interpreters import pxla as _pxla
from jax.extend import source_info_util
from jax.interpreters import ad, batching, mlir, partial_eval
from jaxlib import xla_client as _xla_client

from replicax._src.jax_internals.coordination import NEVER_S
from replicax._src.user.tracebacks import is_full_requested
from replicax._src.user.user_code import PACKAGE, UNKNOWN, is_of_package, is_user_code, place_of

if TYPE_CHECKING:

    class Device(Protocol):
        """A JAX device for type checkers."""

        platform: str
        id: int
        process_index: int

else:
    Device = jax.Device

log = logging.getLogger("replicax")
Literal = jex.Literal
Tracer: Any = jax.core.Tracer
shard_map = jax.shard_map
set_current_trace = jex.set_current_trace

if is_full_requested() and "JAX_TRACEBACK_FILTERING" not in os.environ:
    jax.config.update("jax_traceback_filtering", "off")

# JAX's own errors and profiles then name the user's lines, not ours.
source_info_util.register_exclusion(PACKAGE)

# jax 0.12 has one class for both; 0.10 and 0.11 have two. This goes once they are no longer supported.
_ONE_JAXPR_CLASS = jex.ClosedJaxpr is jex.Jaxpr

# Elementwise operations that jax 0.10 lacks. The derivative of tanh uses the first in 0.12.
NEWER_ELEMENTWISE = frozenset({"one_minus_square", "log2", "polynomial"})
NEWER_MOVES = frozenset({"unstack"})


put_on_devices = _pxla.batched_device_put
"""``put_on_devices(aval, sharding, parts, devices)`` returns the array of which each device has one of ``parts``."""


def backend_started() -> bool:
    """Returns True if JAX has started a backend. There is no public name for it (jax#23320, open; jax 0.10 to 0.12)."""
    return _xla_bridge.backends_are_initialized()


def has_several_cpu_devices() -> bool:
    """Returns True if JAX's backend has several virtual CPU devices in this process, or will have when it starts."""
    num_devices = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]
    return num_devices > 1 or "xla_force_host_platform" in os.environ.get("XLA_FLAGS", "")


def trace(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], axis_env: Sequence[tuple[str, int]] = ()
) -> tuple[Any, list[Any]]:
    """Traces ``fn(*avals)`` to an open jaxpr whose leading invars are the constants it closed over.

    Returns:
      The jaxpr (no constvars) and the constants, in the order of the leading invars.
    """
    closed = jax.make_jaxpr(fn, axis_env=list(axis_env))(*avals)
    return open_jaxpr(closed)


def open_jaxpr(closed: Any) -> tuple[Any, list[Any]]:
    """Splits a closed jaxpr into one without constvars, constants as leading invars, and the constants."""
    inner = closed.jaxpr
    consts = list(closed.consts)
    constvars = list(inner.constvars)
    if not constvars:
        return inner, []
    return rebuild(inner, invars=constvars + list(inner.invars), keep_constvars=False), consts


def rebuild(jaxpr: Any, *, invars=None, outvars=None, eqns=None, keep_constvars: bool = True) -> Any:
    """Returns a jaxpr with some parts replaced."""
    changes: dict[str, Any] = {"debug_info": jaxpr.debug_info.with_unknown_names()}
    if invars is not None:
        changes["invars"] = list(invars)
    if outvars is not None:
        changes["outvars"] = list(outvars)
    if eqns is not None:
        changes["eqns"] = list(eqns)
    if not keep_constvars:
        changes["constvars"] = []
        if _ONE_JAXPR_CLASS:
            changes["consts"] = []
    return jaxpr.replace(**changes)


def eval_jaxpr(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Evaluates a jaxpr without constvars."""
    if _can_copy(current_trace()):
        return _copied_jaxpr(jaxpr, args)
    if _ONE_JAXPR_CLASS:
        return list(jex.jaxpr_as_fun(jaxpr)(*args))
    return list(jax.core.eval_jaxpr(jaxpr, (), *args))


def _copied_jaxpr(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    """Adds the equations of a jaxpr to the current trace."""
    env = dict(zip(jaxpr.invars, args, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, bind_equation(eqn, list(map(read, eqn.invars))), strict=True))
    return list(map(read, jaxpr.outvars))


def export_platform(device: Any = None) -> str:
    """Returns the export platform of a device: ``cuda`` or ``rocm`` if its platform is ``gpu``.

    By default the device is the first one of this process.
    """
    device = jax.local_devices()[0] if device is None else device
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def export(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], platforms: Sequence[str], name: str
) -> bytes:
    """Exports ``fn``, which takes and returns arrays, as StableHLO for another process."""
    fn.__name__ = fn.__qualname__ = re.sub(r"\W", "_", name)
    return bytes(jax.export.export(jax.jit(fn), platforms=tuple(platforms))(*avals).serialize())


def without_dead_code(jaxpr: Any) -> tuple[Any, list[bool]]:
    """Removes dead code at any depth. Returns the jaxpr, and True for each operand that it still uses."""
    reduced, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return reduced, list(used)


def bind_equation(
    eqn: Any, args: Sequence[Any], params: dict[str, Any] | None = None, mesh: Any = None
) -> list[Any]:
    """Evaluates one equation, keeping the user's file and line for errors and HLO.

    Args:
      params: Replaces the parameters of the equation.
      mesh: An abstract mesh that replaces the mesh of the equation's trace.
    """
    if params is not None:
        eqn = eqn.replace(params=params)
    elif mesh is None and (copied := _copied_equation(current_trace(), eqn, args)) is not None:
        return copied
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
        contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh),
    ):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def _copied_equation(trace: Any, eqn: Any, args: Sequence[Any]) -> list[Any] | None:
    """Adds an equation to the trace, with its avals. That takes a fifth of the time of binding it again, for which JAX
    derives them.

    Returns:
      The results; None if the equation must be bound, because the trace does not stage, operands have other avals, or
      the equation has an effect.
    """
    if not _can_copy(trace) or not all(map(_names_axis, eqn.effects)):
        return None
    source = eqn.source_info
    source = source.replace(name_stack=source_info_util.current_name_stack() + source.name_stack)
    operands = []
    for atom, arg in zip(eqn.invars, args, strict=True):
        if isinstance(atom, Literal) and arg is atom.val:
            arg = _staged_tracer()(trace, atom.aval, atom, source)
        elif getattr(arg, "_trace", None) is not trace or not _is_like(arg.aval, atom.aval):
            return None
        operands.append(arg)
    avals = [var.aval for var in eqn.outvars]
    return list(trace.emit_eqn(operands, avals, eqn.primitive, eqn.params, eqn.effects, source, eqn.ctx))


def _can_copy(trace: Any) -> bool:
    return type(trace) is _staging_trace() and _adds_equations()


@functools.cache
def _adds_equations() -> bool:
    """Returns True if this JAX adds equations to a trace with the arguments that are known here (jax 0.10)."""
    emit = getattr(_staging_trace(), "emit_eqn", None)
    if emit is None:
        return False
    names = [*inspect.signature(emit).parameters][1:], [*inspect.signature(_staged_tracer()).parameters][:4]
    return names == (
        ["in_tracers", "out_avals", "primitive", "params", "effects", "source_info", "ctx"],
        ["trace", "aval", "val", "line_info"],
    )


@functools.cache
def _staged_tracer() -> Any:
    """Returns the class of the tracers of traces that build jaxprs, which has no public name (jax 0.10 to 0.12)."""
    found: list[type] = []
    jax.make_jaxpr(lambda x: found.append(type(x)))(0)
    return found[0]


def _is_like(aval: Any, other: Any) -> bool:
    """Returns True if results of both avals have equal avals. Their meshes may differ: ``shard_map`` has one."""
    return aval is other or (
        type(aval) is type(other) is jax.core.ShapedArray
        and aval.shape == other.shape
        and aval.dtype == other.dtype
        and aval.weak_type == other.weak_type
    )


def _names_axis(effect: Any) -> bool:
    return isinstance(effect, _axis_effect())


def at_line_of(eqn: Any) -> Any:
    """Context in which new equations have the user's line of ``eqn``."""
    return source_info_util.user_context(
        eqn.source_info.traceback, name_stack=source_info_util.current_name_stack()
    )


def equation_line(eqn: Any) -> str:
    """Returns ``file:line in function`` of the user's code that made an equation."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for is_named in (
        is_user_code,
        lambda file: not file.startswith(PACKAGE) and not is_of_package(file, "jax"),
    ):  # or the code of a library, such as optax
        for frame in frames:
            if is_named(frame.file_name):
                return place_of(frame.file_name, frame.line_num, frame.function_name.rsplit(".", 1)[-1])
    return UNKNOWN


def transformation() -> str:
    """Returns the function of JAX that traces the caller; "jax.jit" for all that build a jaxpr (scan, checkpoint)."""
    kind = type(current_trace())
    return next((name for name, kinds in _traces_by_transformation().items() if kind in kinds), "jax.jit")


@functools.cache
def _traces_by_transformation() -> dict[str, set[type]]:
    """Returns the classes of traces that do not build jaxprs, which have no public names (jax 0.10 to 0.12)."""
    found: dict[str, set[type]] = {"jax.grad": set(), "jax.vmap": set()}

    def noting(name: str) -> Callable[[Any], Any]:
        return lambda x: (found[name].add(type(current_trace())), x)[1]

    with outside_traces():
        jax.grad(noting("jax.grad"))(1.0)
        jax.jvp(noting("jax.grad"), (1.0,), (1.0,))
        jax.vmap(noting("jax.vmap"))(np.ones(1))
    return found


def is_differentiated(eqn: Any) -> bool:
    """Returns True if an equation was made while JAX differentiated a function (``jax.grad`` and similar)."""
    stack = str(eqn.source_info.name_stack)
    return "jvp(" in stack or "transpose(" in stack


def is_transposed(eqn: Any) -> bool:
    """Returns True if an equation belongs to the backward pass of a differentiated function."""
    return "transpose(" in str(eqn.source_info.name_stack)


def is_recomputed(eqn: Any) -> bool:
    """Returns True if an equation repeats a part of the forward pass (``jax.checkpoint``)."""
    return "rematted_computation" in str(eqn.source_info.name_stack)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constants and carries of a scan equation."""
    if "num_consts" in eqn.params:  # jax 0.10
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def while_counts(eqn: Any) -> tuple[int, int]:
    """Returns the numbers of constants of the condition and of the body of a while equation."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def is_jaxpr(value: Any) -> bool:
    """Returns True if a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


def sub_jaxprs(eqn: Any) -> list[Any]:
    """Returns all jaxprs in an equation's parameters, closed or open, unchanged."""
    found = []
    for value in eqn.params.values():
        if is_jaxpr(value):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(item for item in value if is_jaxpr(item))
    return found


def primitives_of(jaxpr: Any) -> set[str]:
    """Returns the names of all operations of a jaxpr, inner functions included."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in sub_jaxprs(eqn):
            found |= primitives_of(inner_jaxpr(inner)[0])
    return found


def inner_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """Returns a closed or open sub-jaxpr as an open jaxpr and its constants, without moving constvars."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def retraced(jaxpr: Any, evaluate: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Any:
    """Traces an evaluator of a jaxpr to a new jaxpr of the same kind, closed or open.

    Args:
      evaluate: Takes a jaxpr without constvars and its operands.
    """
    inner, consts = inner_jaxpr(jaxpr)
    opened = rebuild(inner, invars=[*inner.constvars, *inner.invars], keep_constvars=False)
    avals = [shaped(v.aval.shape, v.aval.dtype, v.aval.weak_type) for v in inner.invars]
    if consts or isinstance(jaxpr, jex.ClosedJaxpr):
        return jax.make_jaxpr(lambda *args: evaluate(opened, [*consts, *args]))(*avals)
    return trace(lambda *args: evaluate(opened, args), avals)[0]


def has_side_effects(jaxpr: Any) -> bool:
    """Returns True if a jaxpr, closed or open, has side effects, such as callbacks or prints."""
    return any(type(effect) is not _axis_effect() for effect in jaxpr.effects)


@functools.cache
def _axis_effect() -> type:
    """Returns the class of JAX's effect for named axes, which has no public name (jax 0.10 to 0.12)."""
    (effect,) = jax.make_jaxpr(lambda: jax.lax.axis_index("i"), axis_env=[("i", 1)])().effects
    return type(effect)


def is_pmap(eqn: Any) -> bool:
    """Returns True if a ``shard_map`` equation is JAX's own, of a ``jax.pmap``."""
    file = getattr(eqn.params["jaxpr"].debug_info, "func_filename", None)  # no public name (jax 0.10 to 0.12)
    return os.path.basename(file or "") == "pmap.py"


def is_in_collective() -> bool:
    """Returns True if a collective of ``jax.lax`` is flattening its operands. Call it from the flattening function of a
    class.
    """
    frame: Any = sys._getframe(1)
    for module in (frame.f_globals.get("__name__"), "jax._src.tree_util"):
        while frame is not None and frame.f_globals.get("__name__") == module:
            frame = frame.f_back
    return frame is not None and frame.f_globals.get("__name__") == "jax._src.lax.parallel"


_FILES_OF_MAPS = {"pmap.py": "jax.pmap", "shard_map.py": "jax.shard_map"}


def is_jitted(value: Any) -> bool:
    """Returns True for a function that ``jax.jit`` has returned."""
    return type(value) is type(jax.jit(lambda: None))


def name_of_map(value: Any) -> str | None:
    """Returns "jax.pmap" or "jax.shard_map" for one of them, or for a function that it has returned; else None."""
    if value is shard_map or value is getattr(jax, "pmap", None):
        return f"jax.{value.__name__}"
    if not inspect.isfunction(value):
        return None
    inner = [cell.cell_contents for cell in value.__closure__ or ()]
    for function in (value, *inner):
        file = function.__code__.co_filename if inspect.isfunction(function) else ""
        name = _FILES_OF_MAPS.get(os.path.basename(file))
        if name is not None and is_of_package(file, "jax"):
            return name
    return None


def axes_of_shard_map(eqn: Any) -> frozenset[str]:
    """Returns the axes over which a ``shard_map`` equation maps its function."""
    params = eqn.params
    return frozenset(
        params.get("newly_manual_axes") or params.get("manual_axes") or params["mesh"].axis_names
    )


def is_drop_var(atom: Any) -> bool:
    """Returns True if an output of an equation is discarded."""
    return isinstance(atom, jex.DropVar)


def identity_primitive(name: str, *, is_kept_in_gradients: bool = False, gradient: Any = None) -> Any:
    """Creates a primitive that returns its first operand, to mark a value. Further operands are witnesses.

    With one operand it is linear and can be batched.

    Args:
      is_kept_in_gradients: True if it also marks the gradient of a marked value.
      gradient: The primitive that marks this gradient instead; None for none.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda aval, *_, **__: aval)
    mlir.register_lowering(primitive, lambda ctx, x, *_, **__: [x])
    kept = primitive if is_kept_in_gradients else gradient
    ad.deflinear2(primitive, lambda ct, x, **params: [ct if kept is None else kept.bind(ct, **params)])
    batching.defvectorized(primitive)
    return primitive


def jaxpr_primitive(name: str) -> Any:
    """Creates a primitive with the results of the open jaxpr in its parameter ``jaxpr``. A pass must replace it."""
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *_, jaxpr: [var.aval for var in jaxpr.outvars])
    return primitive


def sharding_primitive(name: str) -> Any:
    """Creates a primitive that returns its operand laid out over a mesh, with the parameters ``mesh`` and ``spec``.

    Unlike ``with_sharding_constraint``, it works in a trace without a mesh, because it reads the mesh only at lowering.
    A program for other devices ignores it. So does a program in the global view if the spec names no axis, because no
    spec says "replicated on these axes, and free on the others".
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)

    def lower(ctx: Any, x: Any, *, mesh: Any, spec: Any) -> Any:
        # No public name gives the mesh of the program that is lowered (jax 0.10 to 0.12).
        where = ctx.module_context.axis_context
        mesh_of_replicas = getattr(where, "mesh", None)  # set inside a shard_map
        if mesh_of_replicas is not None:
            is_meant = mesh_of_replicas == mesh
        else:
            names_axis = any(isinstance(dim, tuple) for dim in spec)
            is_meant = names_axis and where.num_devices == mesh.size
        if not is_meant:
            return [x]
        sharding = jax.sharding.NamedSharding(mesh, spec)
        constrain = mlir.lower_fun(lambda value: jax.lax.with_sharding_constraint(value, sharding), False)
        return constrain(ctx, x)

    def batch(args: Sequence[Any], dims: Sequence[Any], *, mesh: Any, spec: Any) -> Any:
        free = jax.sharding.PartitionSpec.UNCONSTRAINED
        wider = jax.sharding.PartitionSpec(*spec[: dims[0]], free, *spec[dims[0] :])
        return primitive.bind(*args, mesh=mesh, spec=wider), dims[0]

    mlir.register_lowering(primitive, lower)
    ad.deflinear2(primitive, lambda ct, x, **params: [primitive.bind(ct, **params)])
    batching.primitive_batchers[primitive] = batch
    return primitive


def marker_primitive(
    name: str,
    abstract_eval: Callable[..., Sequence[Any]],
    refuse: Callable[[str], Exception],
    linear: bool = False,
    one_device: Callable[..., Any] | None = None,
) -> Any:
    """Creates a primitive that marks a place in a jaxpr until it is resolved. Differentiating it calls ``refuse``.

    Args:
      abstract_eval: Returns the avals of its outputs.
      refuse: Builds the error for ``"vmap"``, ``"jax.grad"`` or ``"execution"``.
      linear: True if its derivative is the marker applied to the tangents.
      one_device: What it computes where nobody resolves it; None if that is an error.
    """
    primitive = jex.Primitive(name)
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract_eval)

    def impl(*_args, **_params):
        raise refuse("execution")

    def batch(*_args, **_params):
        raise refuse("vmap")

    def jvp(primals, tangents, **params):
        if not linear:
            raise refuse("jax.grad")
        tangents = [ad.instantiate_zeros(t) for t in tangents]
        return primitive.bind(*primals, **params), primitive.bind(*tangents, **params)

    primitive.def_impl(one_device or impl)
    if one_device is not None:
        mlir.register_lowering(primitive, mlir.lower_fun(one_device))
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


def source_primitive(name: str, abstract_eval: Callable[..., Any]) -> Any:
    """Creates a primitive without operands that stands for an input found while tracing."""
    primitive = jex.Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    return primitive


def is_untyped_constant(value: Any) -> bool:
    """Returns True if a tracer is a Python number that a trace holds as a literal. Each use creates a new tracer.

    The literal, ``val``, has no public name (jax 0.10 to 0.12).
    """
    return (
        isinstance(value, Tracer) and value.weak_type and isinstance(getattr(value, "val", None), jex.Literal)
    )


def shaped(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """Returns an abstract array. ``weak_type`` is True if the dtype comes from a Python number."""
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def abstractify(value: Any) -> Any:
    """Returns the abstract array of a value."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return shaped(value.shape, value.dtype, getattr(value, "weak_type", False))
    return jax.typeof(value)


def described(value: Any, sharding: Any) -> Any:
    """Returns the abstract result of ``jax.device_put`` for a value, and its actual result for a tracer."""
    if isinstance(value, Tracer):
        return jax.device_put(value, sharding)
    aval = abstractify(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


_epochs = itertools.count()
_epoch = jax.make_user_context()


def forgetting_inner_traces() -> Any:
    """Returns a context in which JAX does not use its caches of functions that were traced before."""
    return _epoch(next(_epochs))


_taken_as_arrays: set[type] = set()


def take_as_arrays(kind: type, value_of: Callable[[Any], Any]) -> None:
    """Makes functions that JAX traces (jit and so most of ``jnp``, scan, cond, checkpoint) accept objects of a class as
    arrays.

    JAX requires a pytree there since it no longer calls ``__jax_array__`` (jax#28355). ``jax.tree.map`` still treats
    the objects as leaves: the class is only in the registries for arguments of traced functions. No public name
    registers there, and a registration cannot be undone (jax 0.10 to 0.12; before jax 0.12, jax.grad, vmap and
    custom_jvp do not use these registries). If JAX's private names differ, such functions refuse the objects, as they
    do without replicax.
    """
    registries: list[Any] = [
        getattr(_tree_util, name, None) for name in ("tracing_registry", "dispatch_registry")
    ]
    if None in registries or kind in _taken_as_arrays:
        return
    _taken_as_arrays.add(kind)
    for registry in registries:
        with contextlib.suppress(ValueError):  # already registered: flax registers classes as pytrees
            registry.register_node(kind, lambda held: ((value_of(held),), None), lambda _, values: values[0])


def is_typed_key(dtype: Any) -> bool:
    """Returns True for the dtype of JAX's typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


def on_words(fn: Callable[[Any], Any], array: Any) -> Any:
    """Applies a function to an array. For typed random keys it gets their words, [..., words], and returns such."""
    if not is_typed_key(array.dtype):
        return fn(array)
    return jax.random.wrap_key_data(fn(jax.random.key_data(array)), impl=jax.random.key_impl(array))


outside_traces = jax.ensure_compile_time_eval
"""A context in which JAX evaluates at once, even during a trace."""


@contextlib.contextmanager
def as_if_untraced() -> Iterator[None]:
    """Makes JAX treat this thread as not tracing in the block, so that Keras may call ``jax.set_mesh`` for variables
    with a layout. JAX otherwise refuses that call under a named axis, even where it evaluates at once (jax 0.10 to
    0.12).
    """
    context = _private_core.trace_ctx
    axis_env = context.axis_env
    with outside_traces():
        context.set_axis_env(_private_core.top_axis_env)
        try:
            yield
        finally:
            context.set_axis_env(axis_env)


@contextlib.contextmanager
def not_in_persistent_cache() -> Iterator[None]:
    """Keeps programs that any thread compiles in the block out of the persistent compilation cache.

    (If the cache were disabled instead, the first program would disable it for all later ones: jax 0.10 checks once.)
    """
    name = "jax_persistent_cache_min_compile_time_secs"
    with _changing_cache:
        before = getattr(jax.config, name)
        jax.config.update(name, float("inf"))
        try:
            yield
        finally:
            jax.config.update(name, before)


_changing_cache = threading.RLock()
_WRITTEN = {"backend", "cache_key", "compile_time_secs", "executable", "module_name"}


def keep_programs(open_files: Callable[[str], Any]) -> None:
    """Makes every process store its CPU programs in JAX's persistent cache, if there is one, in other files.

    Call it before the first program. No public name does it. In JAX only process 0 writes (jax#18819, closed; unchanged
    in jax 0.12), but the keys of CPU programs differ between processes. If JAX's private names differ, JAX's own
    behaviour stays.

    Args:
      open_files: Opens the files of a folder, with ``get`` and ``put``.
    """
    try:
        _keep_programs(open_files)
    except (ImportError, AttributeError) as error:
        log.debug("JAX's own cache of compiled programs stays in use: %s", error)


@functools.cache
def _keep_programs(open_files: Callable[[str], Any]) -> None:
    from jax._src import compilation_cache, compiler

    cache_of_files, write = compilation_cache.get_file_cache, compiler._cache_write
    put = compilation_cache.put_executable_and_time
    signature = inspect.signature(write)
    if not set(signature.parameters) >= _WRITTEN:
        raise AttributeError("its cache files have other names")

    def files_of(path: str) -> Any:
        """Returns JAX's own cache if its size is limited or it is not on a local disk, otherwise the other files."""
        is_plain = jax.config.jax_compilation_cache_max_size == -1 and "://" not in path  # type: ignore[attr-defined]
        checks = jax.config.jax_compilation_cache_check_contents  # type: ignore[attr-defined]
        return (open_files(path), path) if is_plain and not checks else cache_of_files(path)

    def write_from_all(*args: Any, **kwargs: Any) -> None:
        """Writes a program from every process. JAX's own function returns at once except in the first process, so that
        the others would recompile CPU programs at each start.
        """
        given = signature.bind(*args, **kwargs).arguments
        backend, seconds = given["backend"], given["compile_time_secs"]
        if backend.platform != "cpu" or not process_number():
            write(*args, **kwargs)
        elif (
            not given.get("host_callbacks")  # jax before 0.12
            and seconds >= jax.config.jax_persistent_cache_min_compile_time_secs  # type: ignore[attr-defined]
        ):
            try:
                put(given["cache_key"], given["module_name"], given["executable"], backend, int(seconds))
            except Exception as error:  # a full disk, for example; JAX only warns too
                log.warning("Cannot keep the compiled program %s: %s", given["module_name"], error)

    compilation_cache.get_file_cache = files_of
    compiler._cache_write = write_from_all


# --- evaluating operation by operation, observed (RunOptions(eager=True)) ------------------------------


class EagerOperation:
    """An operation that JAX is about to evaluate: a primitive, or a function with its own derivative.

    Attributes:
      primitive, params: The same as in an equation of a jaxpr.
    """

    __slots__ = ("_evaluate", "params", "primitive")

    def __init__(
        self, primitive: Any, params: dict[str, Any], evaluate: Callable[..., list[Any]] | None = None
    ):
        self.primitive = primitive
        self.params = params
        self._evaluate = evaluate

    @property
    def name(self) -> str:
        return self.primitive.name

    def __call__(self, *args: Any) -> list[Any]:
        """Evaluates the operation in the current trace. It may be called repeatedly, and differentiated."""
        if self._evaluate is not None:
            return self._evaluate(*args)
        out = self.primitive.bind(*args, **self.params)
        return list(out) if self.primitive.multiple_results else [out]


Observe = Callable[[EagerOperation, list[Any]], list[Any]]


class EagerTrace(jax.core.Trace):
    """Passes every operation to ``observe``, which evaluates it. Values stay concrete arrays.

    JAX calls its ``process_*`` methods, which are undocumented and may change (these match jax 0.10 to 0.12).

    Args:
      observe: Takes the operation and its concrete operands, and returns its results.
      is_recording: Returns True if a function with its own derivative must arrive as one operation.
    """

    __slots__ = ("_is_recording", "_observe")

    def __init__(self, observe: Observe, is_recording: Callable[[], bool]):
        super().__init__()
        self._observe = observe
        self._is_recording = is_recording

    def stage_value(self, value: Any) -> Any:
        if isinstance(value, Late):
            return value.look_up()
        with evaluating():
            return _EVALUATING.stage_value(value)

    def process_primitive(self, primitive: Any, args: Sequence[Any], params: dict[str, Any], /) -> Any:
        results = self._observe(EagerOperation(primitive, params), [_known_now(a) for a in args])
        return results if primitive.multiple_results else results[0]

    def process_call(self, primitive: Any, fun: Any, args: Sequence[Any], params: Any, /) -> Any:
        del primitive, params
        with set_current_trace(self):
            return fun.call_wrapped(*args)

    def process_custom_jvp_call(self, primitive: Any, fun: Any, jvp: Any, args: Any, /, **params: Any) -> Any:
        return self._custom(primitive, (fun, jvp), args, params)

    def process_custom_vjp_call(
        self, primitive: Any, fun: Any, fwd: Any, bwd: Any, args: Any, /, **params: Any
    ) -> Any:
        return self._custom(primitive, (fun, fwd, bwd), args, params)

    def _custom(self, primitive: Any, functions: Any, args: Sequence[Any], params: dict[str, Any]) -> Any:
        args = [_known_now(a) for a in args]
        if not self._is_recording():
            with set_current_trace(self):
                return functions[0].call_wrapped(*args)
        # Such a function can be called only once. A jaxpr of it can be differentiated repeatedly.
        with evaluating():
            jaxpr, consts = trace(lambda *xs: primitive.bind(*xs, subfuns=functions, **params), args)
        operands = [_known_now(c) for c in consts] + args
        return self._observe(
            EagerOperation(primitive, {"jaxpr": jaxpr}, lambda *xs: eval_jaxpr(jaxpr, xs)), operands
        )


class Late(Tracer):
    """A value that is looked up on use: a variable that is read while JAX stages a function (jit, scan, …).

    JAX caches staged functions and reuses them in later steps, which have other values.
    """

    __slots__ = ("look_up",)

    def __init__(self, aval: Any, look_up: Callable[[], Any]):
        super().__init__(_LATE_TRACE, aval)
        self.look_up = look_up

    def full_lower(self) -> Any:
        return self


_LATE_TRACE = jax.core.Trace()


def _known_now(value: Any) -> Any:
    return value.look_up() if isinstance(value, Late) else value


evaluating = jax.core.eval_context
"""A context in which JAX evaluates at once, and nothing observes it."""


def current_trace() -> Any:
    """Returns the trace that currently receives operations."""
    return _private_core.trace_ctx.trace


with evaluating():
    _EVALUATING = current_trace()


def is_evaluating() -> bool:
    """Returns True if JAX evaluates operations at once, because the caller is not in a traced function."""
    current = _private_core.trace_ctx.trace
    return current is None or current is _EVALUATING


def is_staging() -> bool:
    """Returns True if current operations are staged into a jaxpr (jit, scan, cond), at any depth."""
    current = current_trace()
    while current is not None and not isinstance(current, _staging_trace()):
        current = getattr(
            current, "parent_trace", None
        )  # traces of jax.grad and vmap; no public name (jax 0.10 to 0.12)
    return current is not None


def leaves(value: Any, home: Any) -> bool:
    """Returns True if an inner function that JAX traces now would leak a value to the trace ``home`` around it.

    A value that jax.vmap does not batch and that jax.grad does not differentiate belongs to the outer trace already.
    """
    trace, inner = current_trace(), []
    while trace is not home and trace is not _EVALUATING:
        if trace is None or isinstance(trace, _staging_trace()):
            return True
        inner.append(trace)
        trace = getattr(trace, "parent_trace", None)
    return any(getattr(value, "_trace", None) is one for one in inner)  # no public name (jax 0.10 to 0.12)


@functools.cache
def _staging_trace() -> type:
    """Returns the class of traces that build jaxprs, which has no public name (jax 0.10 to 0.12)."""
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(current_trace())))()
    return found[0]


in_eager_mode = jax.make_user_context()
"""A context, ``in_eager_mode(True)``, with JAX caches of inner functions that are separate from those of traces."""


def names_unknown_axis(error: BaseException, name: str) -> bool:
    """Returns True if the error is JAX's error for an unknown axis of this name. JAX has no type for it (jax 0.10 to
    0.12), but raises a NameError without the ``name`` that Python's own have.
    """
    return isinstance(error, NameError) and error.name is None and name in str(error)


def thread_options() -> dict[str, Any]:
    """Returns JAX's options in this thread, which contexts such as ``with jax.default_device(…)`` set per thread."""
    return jax.config.values


@contextlib.contextmanager
def with_thread_options(options: dict[str, Any]) -> Iterator[None]:
    """Applies the options that ``thread_options`` returned in another thread, if JAX has a context for them."""
    here = jax.config.values
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            option = getattr(jax, name.removeprefix("jax_"), None)
            if value != here[name] and option is not None:
                stack.enter_context(option(value))
        yield


# --- arrays on devices of several processes -------------------------------------------------------------


def put(value: Any, sharding: Any) -> jax.Array:
    """Works like ``jax.device_put``, also for devices of other processes, which must put the same value.

    For such devices ``jax.device_put`` would compare the values of all processes by a collective.
    """
    is_traced = isinstance(value, Tracer)
    if sharding.is_fully_addressable or is_traced or getattr(value, "sharding", None) == sharding:
        return jax.device_put(value, sharding)
    with outside_traces():
        array = value if isinstance(value, jax.Array) else np.asarray(value)
        if isinstance(value, jax.Array) and value.is_fully_replicated:
            array = value.addressable_data(0)
        places = sharding.addressable_devices_indices_map(array.shape)
        parts = [jax.device_put(array[index], device) for device, index in places.items()]
        return jax.make_array_from_single_device_arrays(array.shape, sharding, parts)


def put_shards(value: np.ndarray, sharding: Any) -> jax.Array:
    """Puts a host array in shards. Each device of this process gets a copy of its shard, and none the full array.

    With devices of other processes, all must put the same value.
    """
    places = sharding.addressable_devices_indices_map(value.shape)
    parts = [jax.device_put(np.array(value[index]), device) for device, index in places.items()]
    return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)


def local_number(device: Any) -> int:
    """Returns the number of a device among those of its kind in its process, which traces use as its name."""
    number = device.local_hardware_id
    return device.id if number is None else number


def tpu_coordinates(devices: Sequence[Sequence[Any]]) -> np.ndarray:
    """Returns coordinates of TPU devices, [tasks, devices of a task, 4]: (x, y, z, core). Slices are adjacent in x."""
    places = np.array([[(*device.coords, device.core_on_chip) for device in task] for task in devices])
    slices = np.array([[getattr(device, "slice_index", 0) for device in task] for task in devices])
    places[..., 0] += slices * (places[..., 0].max() + 1)
    return places


def copied(value: Any) -> jax.Array:
    """Returns a copy of ``value`` in its own buffers, on the same devices.

    ``jnp.copy`` compiles a program for each shape, and takes ten times as long for small arrays. ``device_put`` with
    ``may_alias=False`` copies only arrays that stay on their devices: it still shares buffers with NumPy arrays, or
    when it puts on more devices (jax 0.10). It may also read NumPy's memory after the call, so it gets a private copy.
    """
    if isinstance(value, np.ndarray):
        return jax.device_put(value.copy())
    is_here = isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_fully_addressable
    if not is_here or is_typed_key(value.dtype):  # device_put does not copy random keys
        return jnp.copy(value)
    return jax.device_put(value, value.sharding, may_alias=False)


_LEAST_VIEWED_BYTES = 1 << 20  # smaller arrays gain nothing


def new_with_memory(
    shape: tuple[int, ...], dtype: Any, sharding: jax.sharding.SingleDeviceSharding | None
) -> tuple[jax.Array, np.ndarray] | None:
    """Returns a new array on a CPU, and its memory: write its values there before anybody else has the array.

    To fill the memory of the array saves a copy in other memory, new pages for that, and copying. The memory is valid
    while the array lives. JAX has no public way to give its buffers to others; it can share those of NumPy, but then
    the first program that the array is donated to copies it.

    Returns:
      None for other devices, for small arrays, and for dtypes that JAX changes or packs.
    """
    dtype = np.dtype(dtype)
    num_bytes = math.prod(shape) * dtype.itemsize
    if num_bytes < _LEAST_VIEWED_BYTES or not (dtype.kind in "biufc" or dtype == jnp.bfloat16):
        return None
    if sharding is not None and next(iter(sharding.device_set)).platform != "cpu":
        return None
    array = jax.device_put(np.empty(shape, dtype), sharding)  # unlike jax.lax.empty it compiles nothing
    jax.block_until_ready(array)
    if array.dtype != dtype or next(iter(array.devices())).platform != "cpu":
        return None
    memory = (ctypes.c_char * num_bytes).from_address(array.unsafe_buffer_pointer())
    return array, np.frombuffer(memory, dtype).reshape(shape)


def put_all(values: Sequence[Any], sharding: Any) -> list[jax.Array]:
    """Puts several arrays like ``put``, in one transfer if this process has all devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(list(values), sharding)
    return [put(value, sharding) for value in values]


# --- devices that are not here --------------------------------------------------------------------------


def devices_of_plan(
    platform: str, name: str, num_devices: int, target: Mapping[str, str] | None = None
) -> list[Any]:
    """Returns devices that programs can be compiled for, but cannot run on.

    Args:
      platform: "tpu", "cuda" or "cpu".
      name: The name of a TPU slice, as its compiler knows it.
      num_devices: The number of virtual CPU devices.
      target: The options of the GPU compiler: ``target_config`` and ``topology``.
    """
    if platform == "cpu":
        return list(_xla_client.make_cpu_client(num_devices=num_devices).devices())
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(name, platform=platform, **(target or {})).devices)


VERSION = jax.__version__
_STATUS = re.compile(r"[A-Z_]{4,}: ")


def is_of_devices(error: BaseException) -> bool:
    """Returns True if an error comes from running a program, not from tracing or compiling it.

    If the CPU runs programs synchronously (jax 0.10), the error is a plain ValueError that begins with the status
    UNKNOWN.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    return type(error) is ValueError and _STATUS.match(str(error)) is not None


# --- the end of the process -----------------------------------------------------------------------------


def end_at_interrupt() -> None:
    """Makes Ctrl-C end the process at once, unless the user's program handles SIGINT itself.

    It runs at exit, before JAX clears its caches. A KeyboardInterrupt in a Python function that C++ calls there aborts
    the process with "terminate called after throwing an instance of 'nanobind::python_error'" (jax 0.10).
    """
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(KeyboardInterrupt):  # from a Ctrl-C that has just arrived
            signal.signal(signal.SIGINT, signal.SIG_DFL)


_code_of_end: int | None = None


def end_beside_programs(code: int) -> None:
    """Makes the process end with this code after its ``atexit`` functions, although threads still run programs.

    Python would end these threads in C++ functions, which aborts the process with "terminate called after throwing an
    instance of" (jax 0.10, Python 3.11). Functions that were registered before JAX was imported do not run.
    """
    global _code_of_end
    _code_of_end = code


def _end_at_once() -> None:
    if _code_of_end is not None:
        logging.shutdown()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none
                stream.flush()
        os._exit(_code_of_end)


# Registered after JAX's handlers, so they run before them, in the opposite order.
atexit.register(_end_at_once)
atexit.register(end_at_interrupt)


# --- several processes ----------------------------------------------------------------------------------


def uses_shardy() -> bool:
    """Returns True if XLA partitions programs by Shardy, the default since jax 0.7."""
    return jax.config.jax_use_shardy_partitioner  # type: ignore[attr-defined]


def requested_cpu_collectives() -> str | None:
    """Returns what JAX_CPU_COLLECTIVES_IMPLEMENTATION, or JAX's option of that name, requests, or None."""
    return jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]


def run_on_cpu_in_order() -> None:
    """Makes the CPU run each program in the thread that calls it. The backend must not have started.

    This reduced a step of a small network on two processes from 9 to 13 ms to 3.5 ms (jax 0.10).
    """
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def join_processes(coordinator: str, num_processes: int, number: int, timeout_s: int) -> None:
    """Makes this process one of several for JAX. The backend must not have started."""
    jax.config.update(
        "jax_enable_recoverability", True
    )  # otherwise an error of one process aborts all (jax 0.10 to 0.12)
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM (jax 0.10 to 0.12)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    if not has_several_cpu_devices():
        run_on_cpu_in_order()
    jax.distributed.initialize(
        coordinator,
        num_processes,
        number,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=NEVER_S,
        # Process 0 also starts an unused service, at a port that gRPC chooses and holds (jax 0.10 to 0.12; no upstream
        # issue: join an existing service).
        coordinator_bind_address="127.0.0.1:0",
    )


def process_number() -> int | None:
    """Returns the number of this process if ``jax.distributed`` was initialized, otherwise None.

    Unlike ``jax.process_index``, it starts no backend.
    """
    state = _distributed.global_state
    return None if state.client is None else state.process_id


def leave_processes() -> None:
    """Makes JAX drop its client of the coordination service, without a message to the service.

    A shutdown of the client waits 305 s for a service that does not answer, and then aborts the process; so does its
    destructor (jax 0.10). With ``jax_enable_recoverability`` the service and the other processes need no goodbye.
    """
    state = _distributed.global_state
    if state.client is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state.client))  # its destructor never runs
        state.client = None

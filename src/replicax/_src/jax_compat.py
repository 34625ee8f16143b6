"""The only file that knows JAX's versions or names outside its public API, but for ``coordination.py``.

It holds small functions with stable meanings; the rest of replicax calls these.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import inspect
import itertools
import logging
import os
import re
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from replicax._src.jax_compat_names import check_names

check_names()  # an import below would name one name, and no version

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

from replicax._src.coordination import NEVER_S
from replicax._src.tracebacks import is_full_asked_for
from replicax._src.user_code import PACKAGE, UNKNOWN, is_user_code

if TYPE_CHECKING:

    class Device(Protocol):
        """A JAX device, as type checkers shall see it."""

        platform: str
        id: int
        process_index: int

else:
    Device = jax.Device

log = logging.getLogger("replicax")
Literal = jex.Literal
Tracer: Any = jax.core.Tracer
shard_map = jax.shard_map
take_current_trace = jex.take_current_trace
set_current_trace = jex.set_current_trace

if is_full_asked_for() and "JAX_TRACEBACK_FILTERING" not in os.environ:
    jax.config.update("jax_traceback_filtering", "off")

_JAX = os.path.dirname(jax.__file__) + os.sep

# JAX's own errors and profiles then name the user's lines, not ours.
source_info_util.register_exclusion(PACKAGE)

# jax 0.12 has one class for both; 0.10 and 0.11 have two, for which we ask as long as they are supported.
_ONE_JAXPR_CLASS = jex.ClosedJaxpr is jex.Jaxpr

# Elementwise operations that jax 0.10 does not have; 0.12 differentiates tanh to the first.
NEWER_ELEMENTWISE = frozenset({"one_minus_square", "log2", "polynomial"})


def put_parts(shape: tuple[int, ...], parts: Sequence[np.ndarray], sharding: Any) -> jax.Array:
    """The array of a shape with ``parts`` on this process's devices of ``sharding``, in the mesh's order.

    ``make_array_from_callback`` does the same with more checks in Python: 34 µs for two arrays on two devices where
    this takes 18, and ``device_put`` 78 (jax 0.10).
    """
    dtype = jax.dtypes.canonicalize_dtype(parts[0].dtype)
    if dtype != parts[0].dtype:
        parts = [part.astype(dtype) for part in parts]
    aval, devices = _placed(shape, dtype, sharding)
    return _pxla.batched_device_put(aval, sharding, parts, devices)


@functools.lru_cache(maxsize=1024)
def _placed(shape: tuple[int, ...], dtype: Any, sharding: Any) -> tuple[Any, list[Any]]:
    devices = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
    return jax.typeof(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)), devices


def backend_started() -> bool:
    """Whether JAX has started a backend in this process. No public name tells (jax#23320, open; jax 0.10 to 0.12)."""
    return _xla_bridge.backends_are_initialized()


def has_several_cpu_devices() -> bool:
    """Whether JAX's backend makes several virtual CPU devices in this process, or will when it starts."""
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
    """A jaxpr with some parts replaced."""
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
    if _ONE_JAXPR_CLASS:
        return list(jex.jaxpr_as_fun(jaxpr)(*args))
    return list(jax.core.eval_jaxpr(jaxpr, (), *args))


def default_platform() -> str:
    """What programs are exported for, to run on the default devices of this process."""
    return export_platform(jax.local_devices()[0])


def export_platform(device: Any) -> str:
    """The same for a device: ``cuda`` or ``rocm``, where its platform is ``gpu``."""
    if device.platform != "gpu":
        return device.platform
    return "rocm" if "rocm" in device.client.platform_version else "cuda"


def export(
    fn: Callable[..., Sequence[Any]], avals: Sequence[Any], platforms: Sequence[str], name: str
) -> bytes:
    """``fn`` as StableHLO, to be loaded elsewhere; ``fn`` takes and gives arrays."""
    fn.__name__ = fn.__qualname__ = re.sub(r"\W", "_", name)
    return bytes(jax.export.export(jax.jit(fn), platforms=tuple(platforms))(*avals).serialize())


def without_dead_code(jaxpr: Any) -> tuple[Any, list[bool]]:
    """A jaxpr that computes only what its results need, at any depth; and which of its operands that takes."""
    reduced, used = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return reduced, list(used)


def bind_equation(
    eqn: Any, args: Sequence[Any], params: dict[str, Any] | None = None, mesh: Any = None
) -> list[Any]:
    """Evaluates one equation, keeping the user's file and line for errors and HLO.

    Args:
      params: In place of its own.
      mesh: An abstract mesh, in place of the one that it was made under.
    """
    if params is not None:
        eqn = eqn.replace(params=params)
    name_stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with (
        source_info_util.user_context(eqn.source_info.traceback, name_stack=name_stack),
        eqn.ctx.manager,
        contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh),
    ):
        out = eqn.primitive.bind(*args, **eqn.primitive.get_bind_params(eqn.params))
    return list(out) if eqn.primitive.multiple_results else [out]


def equation_line(eqn: Any) -> str:
    """``file:line in function`` of the user's code that made an equation."""
    traceback = eqn.source_info.traceback
    frames = [] if traceback is None else traceback.frames
    for is_named in (
        is_user_code,
        lambda file: not file.startswith((PACKAGE, _JAX)),
    ):  # or a library's, such as optax
        for frame in frames:
            if is_named(frame.file_name):
                return f"{frame.file_name}:{frame.line_num} in {frame.function_name.rsplit('.', 1)[-1]}"
    return UNKNOWN


def is_differentiated(eqn: Any) -> bool:
    """Whether an equation was made while JAX differentiated a function (``jax.grad`` and kin)."""
    stack = str(eqn.source_info.name_stack)
    return "jvp(" in stack or "transpose(" in stack


def is_transposed(eqn: Any) -> bool:
    """Returns True if an equation belongs to the backward pass of a differentiated function."""
    return "transpose(" in str(eqn.source_info.name_stack)


def scan_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants and carries of a scan equation."""
    if "num_consts" in eqn.params:  # jax 0.10
        return eqn.params["num_consts"], eqn.params["num_carry"]
    consts, carry, _ = eqn.params["ft_in"].unpack()
    return len(consts), len(carry)


def while_counts(eqn: Any) -> tuple[int, int]:
    """The numbers of constants of the condition and of the body of a while equation."""
    return eqn.params["cond_nconsts"], eqn.params["body_nconsts"]


def is_jaxpr(value: Any) -> bool:
    """Whether a parameter of an equation is a jaxpr, open or closed."""
    return isinstance(value, (jex.Jaxpr, jex.ClosedJaxpr))


def sub_jaxprs(eqn: Any) -> list[Any]:
    """All jaxprs in an equation's parameters, closed or open, as they stand there."""
    found = []
    for value in eqn.params.values():
        if is_jaxpr(value):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            found.extend(item for item in value if is_jaxpr(item))
    return found


def primitives_of(jaxpr: Any) -> set[str]:
    """The names of all operations of a jaxpr, inner functions included."""
    found = set()
    for eqn in jaxpr.eqns:
        found.add(eqn.primitive.name)
        for inner in sub_jaxprs(eqn):
            found |= primitives_of(inner_jaxpr(inner)[0])
    return found


def inner_jaxpr(jaxpr: Any) -> tuple[Any, list[Any]]:
    """An open jaxpr and its constants, of a closed or open sub-jaxpr, without moving constvars."""
    if isinstance(jaxpr, jex.ClosedJaxpr):
        return jaxpr.jaxpr, list(jaxpr.consts)
    return jaxpr, []


def retraced(jaxpr: Any, evaluate: Callable[[Any, Sequence[Any]], Sequence[Any]]) -> Any:
    """A jaxpr of the same kind, closed or open, of what an evaluator does with it.

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
    """Whether running a jaxpr, closed or open, does more than compute: callbacks, prints."""
    return any(type(effect) is not _axis_effect() for effect in jaxpr.effects)


@functools.cache
def _axis_effect() -> type:
    """The class of the effect by which JAX notes that an axis is named, which has no public name (jax 0.10 to 0.12)."""
    (effect,) = jax.make_jaxpr(lambda: jax.lax.axis_index("i"), axis_env=[("i", 1)])().effects
    return type(effect)


def is_drop_var(atom: Any) -> bool:
    """Whether an output of an equation is thrown away."""
    return isinstance(atom, jex.DropVar)


def identity_primitive(name: str) -> Any:
    """A primitive that returns its first operand: a mark on a value; further operands are witnesses.

    With one operand it is linear and can be batched.
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(lambda x, *_, **__: x)
    primitive.def_abstract_eval(lambda aval, *_, **__: aval)
    mlir.register_lowering(primitive, lambda ctx, x, *_, **__: [x])
    ad.deflinear2(primitive, lambda ct, x, **params: [ct])
    batching.defvectorized(primitive)
    return primitive


def sharding_primitive(name: str) -> Any:
    """A primitive that returns its operand, and asks the compiler to lay it out over a mesh: params ``mesh``, ``spec``.

    It may stand in a trace that knows no mesh, which ``with_sharding_constraint`` may not: only when a program is
    lowered is the mesh looked at. A program for other devices leaves the operand alone; so does one in the global view
    if the spec names no axis, since there is no word for "whole on these axes, and as you like on others".
    """
    primitive = jex.Primitive(name)
    primitive.def_impl(lambda x, **_: x)
    primitive.def_abstract_eval(lambda aval, **_: aval)

    def lower(ctx: Any, x: Any, *, mesh: Any, spec: Any) -> Any:
        # No public name says for which mesh a program is lowered (jax 0.10 to 0.12).
        where = ctx.module_context.axis_context
        mesh_of_replicas = getattr(where, "mesh", None)  # inside of a shard_map
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
) -> Any:
    """A primitive that stands in a jaxpr until it is resolved; differentiating it calls ``refuse``.

    Args:
      abstract_eval: The avals of its outputs.
      refuse: Builds the error for ``"vmap"``, ``"jax.grad"`` or ``"execution"``.
      linear: The marker applied to the tangents is its derivative.
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

    primitive.def_impl(impl)
    batching.primitive_batchers[primitive] = batch
    ad.primitive_jvps[primitive] = jvp
    return primitive


def source_primitive(name: str, abstract_eval: Callable[..., Any]) -> Any:
    """A primitive without operands that stands for an input found while tracing."""
    primitive = jex.Primitive(name)
    primitive.def_abstract_eval(abstract_eval)
    return primitive


def is_untyped_constant(value: Any) -> bool:
    """Whether a tracer is a Python number that a trace holds as a literal: each use makes another one of it.

    No public name gives the literal, ``val`` (jax 0.10 to 0.12).
    """
    return (
        isinstance(value, Tracer) and value.weak_type and isinstance(getattr(value, "val", None), jex.Literal)
    )


def shaped(shape: Sequence[int], dtype: Any, weak_type: bool = False) -> Any:
    """An abstract array: shape, dtype and whether Python gave the dtype."""
    return jax.core.ShapedArray(tuple(shape), dtype, weak_type=weak_type)


def abstractify(value: Any) -> Any:
    """The abstract array of a value."""
    if isinstance(value, jax.ShapeDtypeStruct):
        return shaped(value.shape, value.dtype, getattr(value, "weak_type", False))
    return jax.typeof(value)


def described(value: Any, sharding: Any) -> Any:
    """What ``jax.device_put`` of a value would give, without the array; tracers as that gives them."""
    if isinstance(value, Tracer):
        return jax.device_put(value, sharding)
    aval = abstractify(value)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=aval.weak_type)


_epochs = itertools.count()
_epoch = jax.make_user_context()


def forgetting_inner_traces() -> Any:
    """A context in which JAX does not find what it remembers of functions traced before it."""
    return _epoch(next(_epochs))


_taken_as_arrays: set[type] = set()


def take_as_arrays(kind: type, value_of: Callable[[Any], Any]) -> None:
    """Makes functions that JAX traces (jit with nearly all of ``jnp``, scan, cond, checkpoint) take objects of a class
    as arrays.

    JAX asks for a pytree since it no longer calls ``__jax_array__`` there (jax#28355). ``jax.tree.map`` still treats
    the objects as leaves: only the registries in which JAX looks up the arguments of such functions know the class. No
    public name registers there, and nothing takes it back (jax 0.10 to 0.12; before jax 0.12, jax.grad, vmap and
    custom_jvp do not look there). Where JAX has other names inside, such functions refuse the objects as they do
    without replicax.
    """
    registries: list[Any] = [
        getattr(_tree_util, name, None) for name in ("tracing_registry", "dispatch_registry")
    ]
    if None in registries or kind in _taken_as_arrays:
        return
    _taken_as_arrays.add(kind)
    for registry in registries:
        with contextlib.suppress(ValueError):  # known already: a class that flax has registered as a pytree
            registry.register_node(kind, lambda held: ((value_of(held),), None), lambda _, values: values[0])


def is_typed_key(dtype: Any) -> bool:
    """Whether a dtype is that of JAX's typed random keys."""
    return jnp.issubdtype(dtype, jax.dtypes.extended)


outside_traces = jax.ensure_compile_time_eval
"""Inside, JAX evaluates at once, also in the middle of a trace."""


@contextlib.contextmanager
def as_if_untraced() -> Iterator[None]:
    """Inside, JAX takes this thread for one that traces nothing: ``jax.set_mesh`` is allowed, which Keras calls for
    variables with a layout. It is refused while an axis is named, also where JAX evaluates at once (jax 0.10 to 0.12).
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
    """Inside, what is compiled, by any thread, does not go into the persistent compilation cache.

    (Without a cache at all the first program would turn it off for those that follow: JAX asks once, jax 0.10.)
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
_PART_LIVES_S = 3600.0
_WRITTEN = {"backend", "cache_key", "compile_time_secs", "executable", "module_name"}


def keep_programs() -> None:
    """What this process compiles for CPUs is kept in JAX's persistent cache, if there is one, whichever process it is;
    and whole.

    Before the first program. No public name does it: JAX has process 0 alone write (jax#18819, closed; still so in jax
    0.12), while the keys of CPU programs are of one process. Where JAX has other names inside, it keeps programs as it
    does by itself.
    """
    try:
        _keep_programs()
    except (ImportError, AttributeError) as error:
        log.debug("JAX keeps compiled programs in its own way: %s", error)


@functools.cache
def _keep_programs() -> None:
    from jax._src import compilation_cache, compiler, lru_cache

    cache_of_files, write = compilation_cache.get_file_cache, compiler._cache_write
    put = compilation_cache.put_executable_and_time
    whole_files, signature = _whole_files(lru_cache), inspect.signature(write)
    if not set(signature.parameters) >= _WRITTEN:
        raise AttributeError("what it writes has other names")

    def whole_cache_of_files(path: str) -> Any:
        """As JAX has it where its size is limited, or it is on no local disk."""
        is_plain = jax.config.jax_compilation_cache_max_size == -1 and "://" not in path  # type: ignore[attr-defined]
        checks = jax.config.jax_compilation_cache_check_contents  # type: ignore[attr-defined]
        return (whole_files(path), path) if is_plain and not checks else cache_of_files(path)

    def write_from_all(*args: Any, **kwargs: Any) -> None:
        """JAX's own returns at once in all processes but the first: on CPUs these would compile again at each start."""
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
            except Exception as error:  # a full disk, say; JAX, too, only warns
                log.warning("Cannot keep the compiled program %s: %s", given["module_name"], error)

    compilation_cache.get_file_cache = whole_cache_of_files
    compiler._cache_write = write_from_all


def _whole_files(lru_cache: Any) -> Any:
    suffix = lru_cache._CACHE_SUFFIX

    class WholeFiles(lru_cache.LRUCache):
        """JAX's cache of compiled programs in a directory; what is there under the name of a program is whole.

        JAX writes in place, and never again what is there (jax 0.10 to 0.12; no upstream issue: write beside, and
        rename): a process that is killed meanwhile would leave half a program, which costs each process that comes
        after it a compilation, and a warning.
        """

        def __init__(self, path: str):
            super().__init__(path, max_size=-1)
            self._folder = Path(path)  # JAX's own may be one of another library
            for left in self._folder.glob("*.part-*"):
                with contextlib.suppress(OSError):  # another process removes it too
                    if time.time() - left.stat().st_mtime > _PART_LIVES_S:
                        left.unlink()

        def put(self, key: str, value: bytes) -> None:
            part = self._folder / f"{key}.part-{uuid.uuid4().hex}"
            try:
                part.write_bytes(value)
                part.replace(self._folder / f"{key}{suffix}")
            except OSError:
                part.unlink(missing_ok=True)
                raise

    return WholeFiles


# --- evaluating operation by operation, observed (RunOptions(eager=True)) ------------------------------


class Operation:
    """One operation that JAX is about to evaluate: a primitive, or a function with its own derivative.

    Attributes:
      primitive, params: As in an equation of a jaxpr.
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
        """Evaluates it in the current trace; may be called again, and differentiated."""
        if self._evaluate is not None:
            return self._evaluate(*args)
        out = self.primitive.bind(*args, **self.params)
        return list(out) if self.primitive.multiple_results else [out]


Observe = Callable[[Operation, list[Any]], list[Any]]


class EagerTrace(jax.core.Trace):
    """Hands every operation to ``observe``, which evaluates it: values stay concrete arrays.

    JAX calls its ``process_*`` methods, which are not documented and may change (as they stand in jax 0.10 to 0.12).

    Args:
      observe: Takes the operation and its concrete operands, gives its results.
      is_recording: Whether functions with derivatives of their own must come as one operation.
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
        results = self._observe(Operation(primitive, params), [_known_now(a) for a in args])
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
        # Such functions can be called once only; as a jaxpr they can be differentiated as often as one likes.
        with evaluating():
            jaxpr, consts = trace(lambda *xs: primitive.bind(*xs, subfuns=functions, **params), args)
        operands = [_known_now(c) for c in consts] + args
        return self._observe(
            Operation(primitive, {"jaxpr": jaxpr}, lambda *xs: eval_jaxpr(jaxpr, xs)), operands
        )


class Late(Tracer):
    """A value that is looked up where it is used: a variable read while JAX stages a function (jit, scan, …).

    JAX keeps what it has staged and uses it again in other steps, whose values differ.
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
"""Inside, JAX evaluates at once, observed by nobody."""


def current_trace() -> Any:
    """The trace that operations are given to now."""
    with take_current_trace() as current:
        return current


with evaluating():
    _EVALUATING = current_trace()


def is_evaluating() -> bool:
    """Whether JAX evaluates operations at once: the caller is in no function that JAX traces."""
    current = current_trace()
    return current is None or current is _EVALUATING


def is_staging() -> bool:
    """Whether what is computed now ends up in a jaxpr (jit, scan, cond), at any depth."""
    current = current_trace()
    while current is not None and not isinstance(current, _staging_trace()):
        current = getattr(
            current, "parent_trace", None
        )  # of jax.grad and vmap; no public name (jax 0.10 to 0.12)
    return current is not None


@functools.cache
def _staging_trace() -> type:
    """The class of traces that make jaxprs, which has no public name (jax 0.10 to 0.12)."""
    found: list[type] = []
    jax.make_jaxpr(lambda: found.append(type(current_trace())))()
    return found[0]


in_eager_mode = jax.make_user_context()
"""``in_eager_mode(True)``: inside, JAX's caches of inner functions are apart from those of traces."""


def names_unknown_axis(error: BaseException, name: str) -> bool:
    """Whether JAX says that it knows no axis of this name. It has no type of its own for that (jax 0.10 to 0.12), but
    Python's own NameErrors have a ``name``."""
    return isinstance(error, NameError) and error.name is None and name in str(error)


def thread_options() -> dict[str, Any]:
    """The values of JAX's options in this thread (``with jax.default_device(…)`` and kin set them for one thread)."""
    return jax.config.values


@contextlib.contextmanager
def with_thread_options(options: dict[str, Any]) -> Iterator[None]:
    """Inside, this thread has the options that ``thread_options`` found in another, if JAX has a context for them."""
    here = jax.config.values
    with contextlib.ExitStack() as stack:
        for name, value in options.items():
            option = getattr(jax, name.removeprefix("jax_"), None)
            if value != here[name] and option is not None:
                stack.enter_context(option(value))
        yield


# --- arrays on devices of several processes -------------------------------------------------------------


def put(value: Any, sharding: Any) -> jax.Array:
    """``jax.device_put``, also where some of the devices belong to other processes, which have to give the same value.

    ``jax.device_put`` compares the values of all processes there, by a collective of its own.
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


def local_number(device: Any) -> int:
    """The number of a device among those of its kind in its process, by which traces name it."""
    number = device.local_hardware_id
    return device.id if number is None else number


def tpu_coordinates(devices: Sequence[Sequence[Any]]) -> np.ndarray:
    """[tasks, devices of a task, 4]: where each TPU device is, (x, y, z, core); slices stand beside one another in
    x.
    """
    places = np.array([[(*device.coords, device.core_on_chip) for device in task] for task in devices])
    slices = np.array([[getattr(device, "slice_index", 0) for device in task] for task in devices])
    places[..., 0] += slices * (places[..., 0].max() + 1)
    return places


def copied(value: Any) -> jax.Array:
    """A copy in buffers of its own, where ``value`` is.

    ``jnp.copy`` compiles a program for each shape, and takes ten times as long for small arrays. ``device_put`` with
    ``may_alias=False`` copies only arrays that stay where they are: from NumPy, or onto more devices, it shares buffers
    all the same (jax 0.10). It may also read NumPy's memory after the call, so it gets a copy that nobody else changes.
    """
    if isinstance(value, np.ndarray):
        return jax.device_put(value.copy())
    is_here = isinstance(value, jax.Array) and not isinstance(value, Tracer) and value.is_fully_addressable
    if not is_here or is_typed_key(value.dtype):  # random keys are not copied by device_put
        return jnp.copy(value)
    return jax.device_put(value, value.sharding, may_alias=False)


def put_all(values: Sequence[Any], sharding: Any) -> list[jax.Array]:
    """``put`` of several arrays, in one transfer where one process has all devices."""
    if sharding.is_fully_addressable:
        return jax.device_put(list(values), sharding)
    return [put(value, sharding) for value in values]


# --- devices that are not here --------------------------------------------------------------------------


def devices_of_plan(
    platform: str, name: str, num_devices: int, target: Mapping[str, str] | None = None
) -> list[Any]:
    """Devices to compile for, on which nothing can run.

    Args:
      platform: "tpu", "cuda" or "cpu".
      name: Of a TPU slice, as its compiler knows it.
      num_devices: Of virtual CPU devices.
      target: What the compiler of GPUs is told: ``target_config`` and ``topology``.
    """
    if platform == "cpu":
        return list(_xla_client.make_cpu_client(num_devices=num_devices).devices())
    from jax.experimental import topologies

    return list(topologies.get_topology_desc(name, platform=platform, **(target or {})).devices)


VERSION = jax.__version__
_STATUS = re.compile(r"[A-Z_]{4,}: ")


def is_of_devices(error: BaseException) -> bool:
    """Whether an error comes from running a program, not from tracing or compiling it.

    Where the CPU runs programs synchronously (jax 0.10), it is a plain ValueError that begins with a status: UNKNOWN.
    """
    if isinstance(error, jax.errors.JaxRuntimeError):
        return True
    return type(error) is ValueError and _STATUS.match(str(error)) is not None


# --- the end of the process -----------------------------------------------------------------------------


def end_at_interrupt() -> None:
    """From now on Ctrl-C ends the process at once, unless the user's program handles SIGINT itself.

    Runs at exit, before JAX clears its caches: a KeyboardInterrupt in a Python function that C++ calls there aborts the
    process with "terminate called after throwing an instance of 'nanobind::python_error'" (jax 0.10).
    """
    while signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        with contextlib.suppress(KeyboardInterrupt):  # of one that has just come
            signal.signal(signal.SIGINT, signal.SIG_DFL)


atexit.register(end_at_interrupt)  # after JAX has registered its own, so it runs before them


# --- several processes ----------------------------------------------------------------------------------


def cpu_collectives() -> str:
    """What carries collectives between processes on CPUs: ``gloo``, or ``mpi`` where
    JAX_CPU_COLLECTIVES_IMPLEMENTATION, or JAX's option of that name, says so.
    """
    chosen = jax.config.jax_cpu_collectives_implementation  # type: ignore[attr-defined]
    return "mpi" if chosen == "mpi" else "gloo"


def join_processes(coordinator: str, num_processes: int, number: int, timeout_s: int) -> None:
    """Makes this process one of several for JAX. Its backend must not have started; with MPI it has afterwards."""
    jax.config.update("jax_enable_recoverability", True)  # or an error of one aborts all (jax 0.10 to 0.12)
    jax.config.update("jax_enable_preemption_service", False)  # it swallows SIGTERM (jax 0.10 to 0.12)
    jax.config.update("jax_cpu_collectives_implementation", cpu_collectives())
    if not has_several_cpu_devices():
        # A step of a small network took 3.5 ms instead of 9 to 13 on two processes (jax 0.10).
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.distributed.initialize(
        coordinator,
        num_processes,
        number,
        cluster_detection_method="deactivate",
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=NEVER_S,
        # Process 0 starts a service too, which nobody uses, at a port that gRPC chooses and holds (jax 0.10 to 0.12; no
        # upstream issue: join a service that is there).
        coordinator_bind_address="127.0.0.1:0",
    )
    if cpu_collectives() == "mpi":
        _start_mpi()


def _start_mpi() -> None:
    """Starts the backend, and MPI with it, and sees to it that the process can end (jax 0.10).

    JAX finalizes MPI when the process ends, and frees what it has of MPI later, for which MPI aborts the process: so
    its client is never freed.
    """
    client = jax.local_devices()[0].client
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(client))
    atexit.register(_leave_mpi_after_error)  # it runs before JAX finalizes, which it has registered by now


def _leave_mpi_after_error() -> None:
    """Finalizing waits for the other processes, which wait for this one: without it mpirun ends them all."""
    if "last_value" in vars(sys):  # Python has printed an error that nobody caught
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def process_number() -> int | None:
    """The number of this process if ``jax.distributed`` was initialized.

    Starts no backend, which ``jax.process_index`` does.
    """
    state = _distributed.global_state
    return None if state.client is None else state.process_id


def leave_processes() -> None:
    """Makes JAX forget its client of the coordination service, without a word to the service.

    Shutting the client down waits 305 s for a service that does not answer, and aborts the process then; so does its
    destructor (jax 0.10). With ``jax_enable_recoverability`` the service and the others need no goodbye.
    """
    state = _distributed.global_state
    if state.client is not None:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(state.client))  # its destructor never runs
        state.client = None

"""Prepares the arguments of traced functions: converts tensors of other libraries and checks 64-bit arrays.

It recognises classes of other libraries by their methods or names, and imports no library.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.jax_internals import jax_compat
from replicax._src.tracing import key
from replicax._src.tracing.cache import ArgumentLeaf, FunctionPrograms, array_leaf, jax_state, static_leaf
from replicax._src.user.listening import listener
from replicax._src.user.tensorflow_values import OF_VARIABLE, is_variable
from replicax._src.values.framework import Close, open_modules, use_imported
from replicax._src.values.narrowing import names_of, narrowed_at
from replicax._src.vocabulary.errors import InvalidArgumentError, UnsupportedError

_ROOTS = ("args", "kwargs", "closure")


@final
class Call:
    """One call of a traced function: the leaves of its arguments and of the arrays in its closure.

    Attributes:
      fn: The function, unwrapped.
      cells: The cells of its closure that hold arrays, which programs take.
      tree: The structure of (args, kwargs, cells), or of what ``open_modules`` makes of it.
      leaves: The leaves, in the form in which programs take them.
      close: Writes the new state of modules back and returns the results; None if no argument has modules.
      described: The leaves without their values; set by ``describe``.
      arrays: The arrays that the program takes.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        is_leaf: Callable[[Any], bool] | None = None,
        *,
        opens_modules: bool = False,
    ):
        use_imported()  # the arguments may be variables of a framework that was imported since
        self.fn = key.unwrap(fn)
        self.cells, self._is_leaf = key.lifted_cells(self.fn), is_leaf
        pytree: Any = tuple(args), dict(kwargs), self.cells
        self.close: Close | None = None
        if opens_modules:
            pytree, self.close = open_modules(pytree)
        leaves, self.tree = jax.tree_util.tree_flatten(pytree, is_leaf=is_leaf)
        self.leaves = as_arguments(leaves, self.tree, has_modules=self.has_modules)
        self.described: list[ArgumentLeaf] = []
        self.arrays: list[Any] = []

    @property
    def has_modules(self) -> bool:
        return self.close is not None

    @property
    def passes_modules(self) -> bool:
        """True if a module of nnx is an argument, and was not opened."""
        return not self.has_modules and open_modules(self.tree.unflatten(self.leaves))[1] is not None

    @property
    def form(self) -> CallForm:
        """The call without its arrays, once it is described."""
        return CallForm(self.fn, self.tree, self.described, has_modules=self.has_modules)

    def signature(self, *others: Any) -> tuple[Any, ...]:
        """Returns what selects a program of the function: the described call, JAX's settings, and ``others``."""
        return self.tree, tuple(self.described), *others, jax_state()

    @property
    def num_lifted(self) -> int:
        """The number of arrays in ``cells``."""
        return sum(map(key.is_array, jax.tree_util.tree_leaves(self.cells, is_leaf=self._is_leaf)))

    @property
    def inputs(self) -> list[ArgumentLeaf]:
        """The descriptions of ``arrays``."""
        return [leaf for leaf in self.described if leaf.kind != "static"]

    @property
    def paths(self) -> Callable[[], list[str]]:
        """Returns a function that gives the names of the leaves for messages. The function does not hold the leaves."""
        return functools.partial(paths_of, self.tree, has_modules=self.has_modules)

    def describe(
        self,
        programs: FunctionPrograms | None,
        known: Sequence[tuple[ArgumentLeaf, Any] | None] | None = None,
        constant_of: Callable[[Any], Hashable | None] | None = None,
    ) -> None:
        """Describes each leaf.

        Args:
          programs: The function's programs, which take floats that change between calls as inputs; None makes all
            floats constants.
          known: For each leaf, its description and the array that the program takes; None for the default. By default
            all leaves have the default.
          constant_of: Returns a hashable for a leaf that is a constant and equal if that is; None for other leaves.
        """
        known = known or [None] * len(self.leaves)
        for position, (leaf, here) in enumerate(zip(self.leaves, known, strict=True)):
            if constant_of is not None and (constant := constant_of(leaf)) is not None:
                here = ArgumentLeaf("static", value=(type(constant), constant)), None
            described, array = here or (_described(leaf, position, programs), leaf)
            self.described.append(described)
            if described.kind != "static":
                self.arrays.append(array)

    def pytree_of(self, arrays: Sequence[Any]) -> Any:
        """Returns (args, kwargs, cells) with other arrays, such as tracers."""
        return self.form.pytree_of(arrays)

    def finished(self, result: Any) -> Any:
        """Returns what the caller gets for the result of a program."""
        return result if self.close is None else self.close(result)

    def closure_check(self, jaxprs: Sequence[Any]) -> ClosureCheck:
        """Returns the check of the closure, for every call of programs that take ``arrays`` last."""
        return self.form.closure_check(lambda: used_by(jaxprs, len(self.arrays)))


@final
class CallForm:
    """A call of a traced function without its arrays: all that its trace depends on.

    Args:
      fn: The function, unwrapped.
      tree: The structure of (args, kwargs, cells), or of what ``open_modules`` makes of it.
      described: The leaves without their values.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        tree: Any,
        described: Sequence[ArgumentLeaf],
        *,
        has_modules: bool = False,
    ):
        self.fn, self._tree, self._described, self._has_modules = fn, tree, described, has_modules

    @property
    def avals(self) -> list[Any]:
        """The abstract arrays that the program takes."""
        return [leaf.aval() for leaf in self._described if leaf.kind != "static"]

    def pytree_of(self, arrays: Sequence[Any], instead: Callable[[Any], Any] = lambda value: value) -> Any:
        """Returns (args, kwargs, cells) with these arrays.

        Args:
          arrays: The arrays, such as tracers.
          instead: Returns the value of a static leaf in the function.
        """
        remaining = iter(arrays)
        return self._tree.unflatten(
            [instead(leaf.thaw()) if leaf.kind == "static" else next(remaining) for leaf in self._described]
        )

    def opened(
        self, arrays: Sequence[Any], instead: Callable[[Any], Any] = lambda value: value
    ) -> tuple[Callable[..., Any], Any, Any]:
        """Returns the function, its arguments and its keyword arguments with these arrays; see ``pytree_of``."""
        args, kwargs, cells = self.pytree_of(arrays, instead)
        return key.with_cells(self.fn, cells), args, kwargs

    def tracing(self) -> contextlib.AbstractContextManager[None]:
        """Context in which the function is traced: listeners look at its code."""
        return listener().tracing(self.fn)

    def closure_check(self, used: Callable[[], Collection[int]]) -> ClosureCheck:
        """Returns the check of the closure, for every call of programs that use these of the arrays."""
        return ClosureCheck(self._tree, self._described, used, has_modules=self._has_modules)


def _described(leaf: Any, position: int, programs: FunctionPrograms | None) -> ArgumentLeaf:
    if key.is_array(leaf):
        return array_leaf(leaf)
    if type(leaf) is float and programs is not None and programs.is_varying(position, leaf):
        return ArgumentLeaf("whole", (), jnp.result_type(float), weak_type=True)
    return static_leaf(leaf)


def paths_of(tree: Any, *, has_modules: bool = False) -> list[str]:
    """Returns names, for messages, of the leaves of ``(args, kwargs, cells)`` or of the result of ``open_modules``."""
    if not has_modules:
        return names_of(tree, _ROOTS)
    *_, rest, state = tree.children()
    return [*names_of(rest, _ROOTS), *(f"modules{path}" for path in state.unflatten(range(state.num_leaves)))]


def _closure_of(tree: Any, has_modules: bool) -> range:
    """Returns the positions of the leaves of ``cells`` among all leaves."""
    stop = tree.num_leaves
    if has_modules:
        *_, tree, state = tree.children()
        stop -= state.num_leaves
    return range(stop - sum(child.num_leaves for child in tree.children()[2:]), stop)


def as_arguments(leaves: Sequence[Any], tree: Any, *, has_modules: bool = False) -> Sequence[Any]:
    """Returns the leaves of ``(args, kwargs, cells)`` as programs take them.

    ``ClosureCheck`` checks the leaves of the cells (the closure), because it knows the program.

    Raises:
      InvalidArgumentError: The user has to convert a leaf to an array; see ``_as_array``.
      UnsupportedError: A leaf is a ``tf.Variable``.
      NarrowingError: A number does not fit into the dtype that JAX gives its array.
    """
    if not any(map(_needs_a_look, map(type, leaves))):
        return leaves
    names = functools.partial(paths_of, tree, has_modules=has_modules)
    if any(map(_may_be_foreign, map(type, leaves))):
        leaves = [
            _as_array(leaf, lambda i=i: names()[i]) if _may_be_foreign(type(leaf)) else leaf
            for i, leaf in enumerate(leaves)
        ]
    closure = _closure_of(tree, has_modules)
    return narrowed_at((*range(closure.start), *range(closure.stop, len(leaves))), leaves, names)


@final
class ClosureCheck:
    """Checks the 64-bit arrays that a function closes over and its program uses. Checks each array once.

    An array that is used for its shape only is not checked. A program may be called with other arrays of the same
    shapes, so every call checks. A call does not look again at the values of an array that was checked before.

    Args:
      tree: The structure of ``(args, kwargs, cells)``, whose leaves are ``described``.
      used: Returns the indices, among the arrays of the leaves, of those that the program uses.
    """

    def __init__(
        self,
        tree: Any,
        described: Sequence[ArgumentLeaf],
        used: Callable[[], Collection[int]],
        *,
        has_modules: bool = False,
    ):
        closure = _closure_of(tree, has_modules)
        arrays = [i for i, leaf in enumerate(described) if leaf.kind != "static"]
        self._positions = [arrays[n] for n in used() if arrays[n] in closure] if closure else []
        self._names = functools.partial(paths_of, tree, has_modules=has_modules)
        self._checked: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()

    def __call__(self, leaves: Sequence[Any]) -> None:
        """Checks the leaves of a call.

        Raises:
          NarrowingError: A number does not fit into the dtype that JAX gives its array.
        """
        for i in self._positions:
            leaf = leaves[i]
            if self._checked.get(id(leaf)) is not leaf:
                narrowed_at((i,), leaves, self._names)
                if isinstance(leaf, np.ndarray):  # NumPy's scalars have no weak references, and cost little
                    self._checked[id(leaf)] = leaf


def used_by(jaxprs: Sequence[Any], num_arrays: int) -> set[int]:
    """Returns the indices, among the last ``num_arrays`` operands, of those that at least one program uses."""
    used = (jax_compat.without_dead_code(jaxpr)[1] for jaxpr in jaxprs)
    return {i for flags in used for i, is_used in enumerate(flags[len(flags) - num_arrays :]) if is_used}


@functools.lru_cache(maxsize=512)
def _needs_a_look(kind: type) -> bool:
    return issubclass(kind, np.ndarray | np.generic) or _may_be_foreign(kind)


@functools.lru_cache(maxsize=512)
def _may_be_foreign(kind: type) -> bool:
    """Returns True if objects of a class may be tensors of another library than NumPy and JAX."""
    # JAX converts objects with __jax_array__ itself: variables of replicax, Keras and flax, and values of strategies.
    if issubclass(kind, np.ndarray | np.generic | jax.Array | jax_compat.Tracer) or _has(
        kind, "__jax_array__"
    ):
        return False
    return _has(kind, "__array__") or _has(kind, "__dlpack__") or _remedy(kind) is not None


def _as_array(value: Any, name: Callable[[], str]) -> Any:
    """Returns a tensor of another library as a NumPy array, or as a JAX array if its device needs that.

    On CPUs it does not copy: the array shares the tensor's memory.

    Args:
      value: An object of a class that may be foreign. It is returned unchanged if it has no shape and dtype, or holds
        text.
      name: Returns its name for errors.

    Raises:
      UnsupportedError: It is a ``tf.Variable``.
      InvalidArgumentError: The user has to convert it: it is a variable of another library, its rows are in storage
        or labelled, or it is sparse or ragged.
    """
    kind = type(value)
    remedy = _remedy(kind)
    if remedy is not None:
        if is_variable(value):
            raise UnsupportedError(f"{name()} is a tf.Variable, not an array: {remedy}")
        library = kind.__module__.partition(".")[0]
        raise InvalidArgumentError(f"{name()} is a {kind.__name__} of {library}, not an array: {remedy}")
    if not (_has(value, "shape") and _has(value, "dtype")):
        return value
    try:
        array = np.asarray(value) if _has(kind, "__array__") else np.from_dlpack(value)
    except Exception as error:  # the tensor is on a GPU, or NumPy lacks its dtype, such as torch.bfloat16
        try:
            return jax.dlpack.from_dlpack(value)
        except Exception:
            raise InvalidArgumentError(
                f"{name()} is a {kind.__module__}.{kind.__name__} that cannot be made an array: {error} Pass an array, or a tensor "
                "on this process's devices whose gradient is not recorded (torch: x.detach())."
            ) from error
    return array if array.dtype.kind in "biufcV" else value


_READ = {
    ("h5py", "Dataset"): "dataset[start:stop]",
    ("zarr", "Array"): "array[start:stop]",
    ("netCDF4", "Variable"): "variable[start:stop]",
    ("tensorstore", "TensorStore"): "store[start:stop].read().result()",
}
"""Array classes of other libraries that keep their rows in storage, and the expression that reads rows."""


_DENSE = {
    (
        "tensorflow",
        "SparseTensor",
    ): "it is sparse. Pass tf.sparse.to_dense(x), or its indices and values as two arrays",
    (
        "tensorflow",
        "RaggedTensor",
    ): "its rows have different lengths. Pass x.to_tensor(), and a mask or x.row_lengths()",
    (
        "tensorflow",
        "IndexedSlices",
    ): "it is some rows of an array. Pass rx.IndexedSlices(np.asarray(x.values), "
    "np.asarray(x.indices)), or tf.convert_to_tensor(x)",
}
"""Composite tensors, which have no single array, and the expressions that make arrays of them."""
_OF_SCIPY = "it is sparse. Pass x.toarray(), or jax.experimental.sparse.BCOO.from_scipy_sparse(x)"


@functools.lru_cache(maxsize=512)
def _remedy(kind: type) -> str | None:
    """Returns the code to write instead of an object of a class; None if the object can be taken as an array."""
    names = {(base.__module__.partition(".")[0], base.__name__) for base in kind.__mro__}
    if ("tensorflow", "Variable") in names:
        return OF_VARIABLE
    read = next((_READ[name] for name in names if name in _READ), None)
    if read is not None:
        return (
            f"its rows are in storage, and each call would read them all. Read those that it needs: {read}."
        )
    dense = next((_DENSE[name] for name in names if name in _DENSE), None)
    if dense is None and any(base.__module__.startswith("scipy.sparse") for base in kind.__mro__):
        dense = _OF_SCIPY
    if dense is not None:
        return f"{dense}."
    if any(library == "pandas" for library, _ in names):
        return "its rows have labels and its columns may have different dtypes. Pass .to_numpy(), or a dict of arrays."
    return None


def _has(value: Any, name: str) -> bool:
    return getattr(value, name, None) is not None

"""torch's DataLoader, and torchdata's StatefulDataLoader, which can resume from a position."""

from __future__ import annotations

import base64
import copy
import io
import itertools
import pickle
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.description import Description
from replicax._src.input.element_specs import Cardinality, spec_of
from replicax._src.input.elements import (
    Elements,
    NotResumableError,
    Pass,
    UnsupportedSourceError,
    as_arrays,
)

_NOT_RESUMABLE: Final = (
    "The position of a torch DataLoader cannot be saved or restored. Use torchdata.stateful_dataloader."
    "StatefulDataLoader, which takes the same arguments."
)


def describe_torch(dataset: Any) -> Description | None:
    """Describes a ``torch.utils.data.DataLoader``; returns None for any other value.

    Its elements are the pytrees that ``collate_fn`` makes, with tensors as NumPy arrays. Tensors on other devices are
    copied to the host. ``batch_size`` is the global batch size.

    Raises:
      UnsupportedSourceError: The value is a torch Dataset. Wrap it in a DataLoader.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return None
    if isinstance(dataset, data.DataLoader):
        torchdata = sys.modules.get("torchdata.stateful_dataloader")
        is_stateful = torchdata is not None and isinstance(dataset, torchdata.StatefulDataLoader)
        loader = _Loader(dataset, is_stateful=is_stateful)
        return Description(loader.text, loader.elements)
    if isinstance(dataset, data.Dataset):
        raise UnsupportedSourceError(
            f"Got the torch Dataset {type(dataset).__name__}, whose elements are rows. Wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=global_batch_size)."
        )
    return None


@final
class _Loader:
    """A DataLoader, and a reference to the iterator that was started last.

    Args:
      is_stateful: True for a StatefulDataLoader.
    """

    def __init__(self, loader: Any, *, is_stateful: bool):
        self._loader, self._is_stateful = loader, is_stateful
        self._spec: Any = None
        self._newest: weakref.ref[_LoaderIterator] | None = None

    @property
    def text(self) -> str:
        """The display text of the loader."""
        loader = self._loader
        kind = type(loader).__name__
        size = "no batch_size" if loader.batch_size is None else f"batch_size {loader.batch_size}"
        workers = f"{loader.num_workers} worker" + "s" * (loader.num_workers != 1)
        return f"a torch {kind} ({size}, {workers})"

    def elements(self) -> Elements:
        """Returns the elements of the loader."""
        loader = self._loader
        return Elements(
            self.text,
            self._start,
            count=self._count,
            is_count_promised=True,
            declared_spec=lambda: self._spec,  # reading the first element again would restart the workers
            peek=self._look,
            fingerprint=lambda: _fingerprint(loader, self._count()),
            not_resumable=None if self._is_stateful else _NOT_RESUMABLE,
        )

    def _start(self) -> Iterator[Any] | _LoaderIterator:
        if not self._is_stateful:
            return map(self._seen, self._loader)
        # A StatefulDataLoader knows the position of one iterator only. It is reused where possible, to keep persistent
        # workers.
        before = self._newest() if self._newest is not None else None
        is_free = before is None or before.has_ended
        new = _LoaderIterator(self._loader if is_free else self._twin(), self._seen)
        self._newest = weakref.ref(new)
        return new

    def _count(self) -> Cardinality | None:
        is_stream = isinstance(self._loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
        if (
            is_stream and self._loader.num_workers > 1
        ):  # torch only estimates, because each worker has its own last batch
            return None
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    def _look(self) -> Iterator[Any]:
        """Reads the first element without changing the order of the next pass."""
        generators = _generators(self._loader)
        states = [generator.get_state() for generator in generators]
        with sys.modules["torch"].random.fork_rng(devices=[]):
            loader = self._twin() if self._is_stateful else self._loader
            first = list(itertools.islice(map(self._seen, loader), 1))
        for generator, state in zip(generators, states):
            generator.set_state(state)
        return iter(first)

    def _seen(self, element: Any) -> Any:
        """Returns an element of the loader as arrays."""
        arrays = as_arrays(jax.tree.map(_as_numpy, element))
        if self._spec is None:
            self._spec = spec_of(arrays)
        return arrays

    def _twin(self) -> Any:
        """Returns a copy of the loader with its own iterators."""
        twin = copy.copy(self._loader)
        twin._iterator = None
        return twin


@final
class _LoaderIterator(Pass):
    """A pass through a StatefulDataLoader.

    Its position is the state of the loader and those of the generators. The loader's state is None if nothing was read
    and no workers were started.
    """

    def __init__(self, loader: Any, seen: Callable[[Any], Any]):
        self._loader, self._seen = loader, seen
        self._generators = _generators(loader)
        self._iterator: Iterator[Any] | None = None
        self._begins_with: list[Any] | None = None  # the states of the generators that get_state returned
        self._is_checked = False  # True if its states were checked to be readable
        self.has_ended = False

    def __next__(self) -> Any:
        try:
            return self._seen(next(self._started()))
        except BaseException:
            self.has_ended = True
            raise

    def get_state(self) -> dict[str, str]:
        """Returns the position, as JSON."""
        is_begun = self._iterator is not None or not _is_told_by_generators(self._loader)
        if is_begun:
            self._started()
        # torchdata saves its state from before this epoch, and draws one number less when it resumes (torchdata 0.11).
        states = [generator.get_state() for generator in self._generators]
        if not is_begun:
            self._begins_with = states
        written = _written(
            (self._loader.state_dict() if is_begun else None, states), checks=not self._is_checked
        )
        self._is_checked = is_begun
        return {"torch": written}

    def set_state(self, state: dict[str, str]) -> None:
        """Moves to a position. If the position is rejected, the loader is unchanged."""
        of_loader, of_generators = _read(state["torch"])
        if len(of_generators) != len(self._generators) or of_loader == {}:
            raise ValueError(f"states of {len(of_generators)} generators, of the loader {of_loader!r:.200}")
        before = [generator.get_state() for generator in self._generators]
        iterator = None
        try:
            if of_loader is not None:
                self._loader.load_state_dict(of_loader)
                iterator = iter(self._loader)
            for generator, its_state in zip(self._generators, of_generators):
                generator.set_state(its_state)
        except Exception:
            self._loader.load_state_dict({})
            self._loader.next_iter_state = (
                None  # the line above does not clear this, so each new iterator would fail
            )
            for generator, its_state in zip(self._generators, before):
                generator.set_state(its_state)
            raise
        self._iterator, self._begins_with = iterator, None

    def _started(self) -> Iterator[Any]:
        if self._iterator is None:
            if self._begins_with is not None:  # another pass may have drawn from them since
                for generator, state in zip(self._generators, self._begins_with):
                    generator.set_state(state)
            self._iterator = iter(self._loader)
        return self._iterator


def _fingerprint(loader: Any, length: Cardinality | None) -> dict[str, Any]:
    """Returns JSON that tells a loader from others."""
    try:
        num_rows = len(loader.dataset)
    except (TypeError, NotImplementedError):
        num_rows = None
    return {
        "kind": "torch StatefulDataLoader",
        "batch_size": loader.batch_size,
        "length": length,
        "num_rows": num_rows,
        "drop_last": loader.drop_last,
        "num_workers": loader.num_workers,
        "dataset": type(loader.dataset).__name__,
        "samplers": [type(loader.sampler).__name__, type(loader.batch_sampler).__name__],
    }


def _generators(loader: Any) -> list[Any]:
    """Returns the generators for the order of a loader's rows and for the seeds of its workers."""
    both = (loader.generator, vars(loader.sampler).get("generator"))
    return list({id(one): one for one in both if one is not None}.values())


def _is_told_by_generators(loader: Any) -> bool:
    """True if the states of the generators identify a pass that has not begun. Then its state needs no start of the
    workers.

    Without workers, the loader's own state is cheap to get. A user's datasets and samplers may have their own state.
    """
    if loader.num_workers == 0 or loader.next_iter_state is not None:
        return False
    stateful = sys.modules["torchdata.stateful_dataloader"].Stateful
    samplers = (loader.sampler, loader.batch_sampler)
    are_known = all(
        type(one).__module__.split(".")[0] in ("torch", "torchdata", "builtins") for one in samplers
    )
    return are_known and not any(isinstance(one, stateful) for one in (*samplers, loader.dataset))


# --- tensors ------------------------------------------------------------------------------------------


def _as_numpy(leaf: Any) -> Any:
    """Returns a tensor as a NumPy array and other mappings (a BatchEncoding) as dicts. Returns any other value
    unchanged.
    """
    torch = sys.modules["torch"]
    if isinstance(leaf, Mapping):
        return {key: jax.tree.map(_as_numpy, leaf[key]) for key in leaf}
    if not isinstance(leaf, torch.Tensor):
        return leaf
    _check_dense(leaf)
    tensor = leaf.detach().cpu().resolve_conj().resolve_neg()
    narrow = _NARROW_FLOATS.get(str(tensor.dtype))
    if narrow is None:
        return tensor.numpy()
    bits = torch.uint8 if tensor.element_size() == 1 else torch.int16
    return tensor.contiguous().view(bits).numpy().view(narrow)


_NARROW_FLOATS: Final[dict[str, Any]] = {
    "torch.bfloat16": np.dtype(jnp.bfloat16),
    "torch.float8_e4m3fn": np.dtype(jnp.float8_e4m3fn),
    "torch.float8_e4m3fnuz": np.dtype(jnp.float8_e4m3fnuz),
    "torch.float8_e5m2": np.dtype(jnp.float8_e5m2),
    "torch.float8_e5m2fnuz": np.dtype(jnp.float8_e5m2fnuz),
}
"""The dtypes of torch that NumPy alone does not have."""


def _check_dense(tensor: Any) -> None:
    torch = sys.modules["torch"]
    if tensor.is_nested:
        raise UnsupportedElementError(
            f"Got a nested tensor of {tensor.size(0)} rows; batches are dense. Pad it in collate_fn: "
            "torch.nested.to_padded_tensor(x, 0), or torch.nn.utils.rnn.pad_sequence on the rows."
        )
    if tensor.layout != torch.strided:
        raise UnsupportedElementError(
            f"Got a tensor with layout {tensor.layout} of shape {tuple(tensor.shape)}; batches are dense. Convert it "
            "in collate_fn with x.to_dense()."
        )
    if tensor.is_quantized:
        raise UnsupportedElementError(
            f"Got a quantized tensor ({tensor.dtype}), which JAX cannot hold. Convert it in collate_fn with "
            "x.dequantize() or x.int_repr()."
        )


# --- states -------------------------------------------------------------------------------------------


def _written(states: Any, *, checks: bool) -> str:
    """Returns states as text that JSON can hold.

    Raises:
      NotResumableError: A value cannot be written, or with ``checks`` cannot be read back.
    """
    buffer = io.BytesIO()
    try:
        sys.modules["torch"].save(states, buffer)
        text = base64.b64encode(buffer.getvalue()).decode()
        if checks:
            _read(text)
    except (pickle.PickleError, AttributeError, TypeError) as error:
        raise NotResumableError(
            "The state of the StatefulDataLoader has something in it that torch.load(weights_only=True) cannot read. "
            f"Make state_dict of the dataset and sampler return numbers, strings, lists, dicts and arrays. ({error})"
        ) from error
    return text


def _read(text: str) -> Any:
    """Returns the states from their text: tensors, arrays, numbers, strings and containers of them. It runs no code
    from the text.
    """
    torch = sys.modules["torch"]
    with torch.serialization.safe_globals(_ARRAY_TYPES):
        return torch.load(io.BytesIO(base64.b64decode(text)), weights_only=True)


_ARRAY_TYPES: Final[list[Any]] = [
    np.ndarray,
    np.dtype,
    *{type(np.dtype(code)) for code in "?bhilqBHILQefdFD"},
    *(value.__reduce__()[0] for value in (np.zeros(1), np.float32(0))),  # the functions that rebuild arrays
]

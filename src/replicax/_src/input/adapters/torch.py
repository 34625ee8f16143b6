"""torch's DataLoader, and torchdata's StatefulDataLoader, which can be continued from a position."""

from __future__ import annotations

import base64
import collections
import copy
import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Final, final

import jax
import jax.numpy as jnp
import numpy as np

from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.elements import (
    Elements,
    LengthCheck,
    NotResumableError,
    Pass,
    StreamPass,
    Traits,
    UnsupportedSourceError,
    as_arrays,
    check_same_dataset,
    first_element,
)
from replicax._src.input.order import Cardinality
from replicax._src.input.specs import spec_of

_NOT_RESUMABLE: Final = (
    "The position of a torch DataLoader cannot be saved or restored. Use torchdata.stateful_dataloader."
    "StatefulDataLoader, which takes the same arguments."
)


def open_torch(dataset: Any) -> Elements | None:
    """Opens a ``torch.utils.data.DataLoader``; None if it is none.

    Its elements are nests as ``collate_fn`` makes them, tensors as NumPy arrays: those on other devices are
    brought to the host. ``batch_size`` is the global batch size.

    Raises:
      UnsupportedSourceError: It is a torch Dataset, which needs a DataLoader around it.
    """
    data = sys.modules.get("torch.utils.data")
    if data is None:
        return None
    if isinstance(dataset, data.DataLoader):
        torchdata = sys.modules.get("torchdata.stateful_dataloader")
        is_stateful = torchdata is not None and isinstance(dataset, torchdata.StatefulDataLoader)
        return LoaderElements(dataset, is_stateful=is_stateful)
    if isinstance(dataset, data.Dataset):
        raise UnsupportedSourceError(
            f"Got the torch Dataset {type(dataset).__name__}, whose elements are rows. Wrap it: "
            "torch.utils.data.DataLoader(dataset, batch_size=global_batch_size)."
        )
    return None


@final
class LoaderElements(Elements):
    """The elements of a DataLoader.

    Args:
      is_stateful: It is a StatefulDataLoader.
    """

    def __init__(self, loader: Any, *, is_stateful: bool):
        self._loader, self._is_stateful = loader, is_stateful
        self._spec: Any = None
        self._newest: weakref.ref[_StatefulPass] | None = None

    @property
    def traits(self) -> Traits:
        loader = self._loader
        kind = type(loader).__name__
        size = "no batch_size" if loader.batch_size is None else f"batch_size {loader.batch_size}"
        workers = f"{loader.num_workers} worker" + "s" * (loader.num_workers != 1)
        return Traits(f"a torch {kind} ({size}, {workers})")

    @property
    def cardinality(self) -> Cardinality | None:
        is_stream = isinstance(self._loader.dataset, sys.modules["torch.utils.data"].IterableDataset)
        if is_stream and self._loader.num_workers > 1:  # torch only guesses: each worker has a last batch
            return None
        try:
            return len(self._loader)
        except (TypeError, NotImplementedError):
            return None

    def iterate(self) -> Pass:
        if not self._is_stateful:
            return StreamPass(map(self.as_seen, self._loader), _NOT_RESUMABLE, self.cardinality)
        # A StatefulDataLoader knows the position of one iterator. It is used as it is where possible, for the sake
        # of persistent workers.
        before = self._newest() if self._newest is not None else None
        is_free = before is None or before.has_ended
        new = _StatefulPass(self._loader if is_free else self._twin(), self)
        self._newest = weakref.ref(new)
        return new

    def declared_spec(self) -> Any:
        """What was seen of the first element: to look at it again would start the workers once more."""
        return self._spec

    def first(self) -> Any:
        """Looks at the first element; the order of the next pass is what it would have been."""
        generators = _generators(self._loader)
        states = [generator.get_state() for generator in generators]
        with sys.modules["torch"].random.fork_rng(devices=[]):
            element = first_element(map(self.as_seen, self._twin() if self._is_stateful else self._loader))
        for generator, state in zip(generators, states):
            generator.set_state(state)
        return element

    def as_seen(self, element: Any) -> Any:
        """Returns an element of the loader as arrays."""
        arrays = as_arrays(jax.tree.map(_as_numpy, element))
        if self._spec is None:
            self._spec = spec_of(arrays)
        return arrays

    def _twin(self) -> Any:
        """A loader of the same, whose iterators are its own."""
        twin = copy.copy(self._loader)
        twin._iterator = None
        return twin


@final
class _StatefulPass(Pass):
    """A pass through a StatefulDataLoader.

    Its state is the loader's (None: nothing was read, and no workers were started), those of the generators, the
    number of the next element, and the fingerprint.
    """

    def __init__(self, loader: Any, elements: LoaderElements):
        self._loader, self._elements = loader, elements
        self._count = LengthCheck(elements.cardinality)
        self._fingerprint = _fingerprint(loader, elements.cardinality)
        self._generators = _generators(loader)
        self._writer = _StateWriter()
        self._iterator: Iterator[Any] | None = None
        self._begins_with: list[Any] | None = None  # the states of the generators that get_state has promised
        self.has_ended = False

    def __next__(self) -> Any:
        try:
            return self._elements.as_seen(self._count.next_of(self._started()))
        except BaseException:
            self.has_ended = True
            raise

    def get_state(self) -> Any:
        is_begun = self._iterator is not None or not _is_told_by_generators(self._loader)
        if is_begun:
            self._started()
        # torchdata saves its state before this epoch, and draws once less when it goes on (torchdata 0.11).
        states = [generator.get_state() for generator in self._generators]
        if not is_begun:
            self._begins_with = states
        return {
            "position": self._count.num_elements,
            "torch": self._writer.as_json(self._loader.state_dict()) if is_begun else None,
            "generators": self._writer.as_json(states),
            **self._fingerprint,
        }

    def set_state(self, state: Any) -> None:
        check_same_dataset(state, self._fingerprint)
        of_loader, of_generators = _read_state(state, len(self._generators))
        before = [generator.get_state() for generator in self._generators]
        iterator = None
        try:
            if of_loader is not None:
                self._loader.load_state_dict(of_loader)
                iterator = iter(self._loader)
            for generator, its_state in zip(self._generators, of_generators):
                generator.set_state(its_state)
        except Exception as error:
            self._loader.load_state_dict({})
            self._loader.next_iter_state = None  # the line above leaves it, and each new iterator would fail
            for generator, its_state in zip(self._generators, before):
                generator.set_state(its_state)
            raise NotResumableError(
                f"The StatefulDataLoader does not take the state ({type(error).__name__}: {error}). Give back what "
                "get_state returned for a loader that is made in the same way."
            ) from error
        self._iterator, self._begins_with = iterator, None
        self._count.num_elements = state["position"]

    def _started(self) -> Iterator[Any]:
        if self._iterator is None:
            if self._begins_with is not None:  # another pass may have drawn since
                for generator, state in zip(self._generators, self._begins_with):
                    generator.set_state(state)
            self._iterator = iter(self._loader)
        return self._iterator


def _fingerprint(loader: Any, length: Cardinality | None) -> dict[str, Any]:
    """Returns what tells a loader from another."""
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
    """Returns the generators that the order of a loader's rows, and the seeds of its workers, are drawn from."""
    both = (loader.generator, vars(loader.sampler).get("generator"))
    return list({id(one): one for one in both if one is not None}.values())


def _is_told_by_generators(loader: Any) -> bool:
    """Whether a pass that has not begun is told by the states of the generators, so that no workers are started to ask
    them. Without workers asking costs nothing. Datasets and samplers of the user's may have a state of their own.
    """
    if loader.num_workers == 0 or loader.next_iter_state is not None:
        return False
    stateful = sys.modules["torchdata.stateful_dataloader"].Stateful
    samplers = (loader.sampler, loader.batch_sampler)
    are_known = all(
        type(one).__module__.split(".")[0] in ("torch", "torchdata", "builtins") for one in samplers
    )
    return are_known and not any(isinstance(one, stateful) for one in (*samplers, loader.dataset))


def _read_state(state: dict[str, Any], num_generators: int) -> tuple[Any, list[Any]]:
    """Returns the states of the loader and of the generators from what ``get_state`` returned."""
    try:
        of_loader, of_generators = _from_json(state["torch"]), _from_json(state["generators"])
        is_valid = len(of_generators) == num_generators and state["position"] >= 0
        is_begun = isinstance(of_loader, dict) and bool(of_loader)
        is_valid = is_valid and (is_begun or (of_loader is None and state["position"] == 0))
    except (LookupError, TypeError, ValueError) as error:
        raise _malformed(state) from error
    if not is_valid:
        raise _malformed(state)
    return of_loader, of_generators


def _malformed(state: dict[str, Any]) -> NotResumableError:
    return NotResumableError(
        f"The state is not one that get_state returned for such a StatefulDataLoader: position {state['position']!r}, "
        f"torch {state.get('torch')!r:.200}, generators {state.get('generators')!r:.200}."
    )


# --- tensors ------------------------------------------------------------------------------------------


def _as_numpy(leaf: Any) -> Any:
    """Returns a tensor as a NumPy array, and other mappings (a BatchEncoding) as dicts; all else as it is."""
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


_PLAIN: Final = (bool, int, float, str)
_NUM_WRITTEN: Final = (
    4  # a loader's generator before and after it drew the order, and the same of its sampler
)


@final
class _StateWriter:
    """Writes the states of a loader as JSON: what JSON lacks becomes ``{"__kind__": ...}``.

    Generators have 5 kB of state that changes only with the epoch, so what was written of it is kept.
    """

    def __init__(self):
        self._written: collections.deque[tuple[Any, Any]] = collections.deque(maxlen=_NUM_WRITTEN)

    def as_json(self, value: Any) -> Any:
        """Returns what JSON can hold.

        Raises:
          NotResumableError: There is something in it that has no such form.
        """
        torch = sys.modules["torch"]
        if value is None or isinstance(value, _PLAIN):
            return value
        if isinstance(value, list):
            return [self.as_json(item) for item in value]
        if isinstance(value, tuple):
            return {"__kind__": "tuple", "items": [self.as_json(item) for item in value]}
        if isinstance(value, dict):
            if "__kind__" not in value and all(type(key) is str for key in value):
                return {key: self.as_json(item) for key, item in value.items()}
            items = [[self.as_json(key), self.as_json(item)] for key, item in value.items()]
            return {"__kind__": "dict", "items": items}
        if isinstance(value, bytes):
            return {"__kind__": "bytes", "data": base64.b64encode(value).decode()}
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
            return {"__kind__": "array", **_array_as_json(np.asarray(value))}
        raise NotResumableError(
            f"The state of the StatefulDataLoader has {value!r} of type {type(value).__name__} in it, which cannot be "
            "written as JSON. Let state_dict of the dataset and sampler return numbers, texts, lists, dicts and arrays."
        )

    def _tensor(self, tensor: Any) -> Any:
        torch = sys.modules["torch"]
        if tensor.dtype != torch.uint8 or tensor.ndim != 1 or not tensor.is_cpu:
            return {"__kind__": "tensor", **_array_as_json(_as_numpy(tensor))}
        for seen, written in self._written:
            if torch.equal(seen, tensor):
                return written
        written = {"__kind__": "tensor", **_array_as_json(_as_numpy(tensor))}
        self._written.append((tensor.clone(), written))
        return written


def _array_as_json(array: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(array.tobytes()).decode()
    return {"dtype": str(array.dtype), "shape": list(array.shape), "data": data}


def _from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [_from_json(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "__kind__" not in value:
        return {key: _from_json(item) for key, item in value.items()}
    kind = value["__kind__"]
    if kind == "tuple":
        return tuple(_from_json(item) for item in value["items"])
    if kind == "dict":
        return {_from_json(key): _from_json(item) for key, item in value["items"]}
    data = base64.b64decode(value["data"])
    if kind == "bytes":
        return data
    array = np.frombuffer(bytearray(data), np.dtype(value["dtype"])).reshape(value["shape"])
    return _as_tensor(array) if kind == "tensor" else array


def _as_tensor(array: np.ndarray) -> Any:
    torch = sys.modules["torch"]
    name = array.dtype.name
    if f"torch.{name}" not in _NARROW_FLOATS:
        return torch.from_numpy(array)
    bits = np.uint8 if array.itemsize == 1 else np.int16
    return torch.from_numpy(array.view(bits)).view(vars(torch)[name])

"""The elements of a FileDataset, for distributed datasets."""

from __future__ import annotations

from typing import Any, final

from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.elements import (
    Elements,
    Pass,
    Traits,
    as_arrays,
    check_before_pass,
    first_element,
)
from replicax._src.input.files.chunks import num_rows_of, rows_of
from replicax._src.input.files.dataset import FileDataset
from replicax._src.input.order import Cardinality


def open_files(dataset: Any) -> Elements | None:
    """Opens a FileDataset; None if it is none.

    Raises:
      UnsupportedElementError: Its elements are text or bytes.
    """
    if not isinstance(dataset, FileDataset):
        return None
    if dataset.is_raw:
        raise UnsupportedElementError(
            f"The elements of {dataset!r} are text or bytes, which no device holds. Call .map(parse), where parse "
            "makes a nest of arrays of one record, and then .batch(n)."
        )
    return FileElements(dataset)


@final
class FileElements(Elements):
    """The elements of a FileDataset that are arrays."""

    def __init__(self, dataset: FileDataset):
        self._dataset = dataset

    @property
    def traits(self) -> Traits:
        dataset = self._dataset
        return Traits(
            dataset.description,
            is_batched=dataset.is_batched,
            batch_size=dataset.batch_size,
            is_immutable=not dataset.is_mapped_in_batches,
            num_files=len(dataset.files),
            of_files=lambda num, index: FileElements(dataset.of_files(num, index)),
            of_hint=(lambda num, index: FileElements(dataset.with_hint(num, index)))
            if dataset.has_hint
            else None,
        )

    @property
    def cardinality(self) -> Cardinality | None:
        return self._dataset.cardinality

    def iterate(self) -> Pass:
        return _FilePass(self._dataset)

    def declared_spec(self) -> Any:
        return self._dataset.element_spec

    def first(self) -> Any:
        cursor = self._dataset.open((self._dataset.passes.num_begun,))
        return first_element(map(as_arrays, rows_of(cursor.read(1))))


@final
class _FilePass(Pass):
    """A pass through a FileDataset; its state is (pass, cursor, seeds), so that later passes go on alike."""

    def __init__(self, dataset: FileDataset):
        self._dataset = dataset
        self._begin(dataset.passes.begin(), 0)

    def __next__(self) -> Any:
        chunk = self._cursor.read(1)
        if not num_rows_of(chunk):
            raise StopIteration
        self._position += 1
        (element,) = rows_of(chunk)
        return element if self._dataset.is_columns else as_arrays(element)

    def get_state(self) -> Any:
        mine = {"position": self._position, "cursor": self._cursor.get_state()}
        return {**mine, "passes": self._dataset.passes.num_begun, **self._constant}

    def set_state(self, state: Any) -> None:
        dataset = self._dataset
        check_before_pass(state, dataset.fingerprint, dataset.passes, self._constant["pass"])
        self._dataset.continue_from(int(state["passes"]), state["seeds"])
        self._begin(int(state["pass"]), int(state["position"]))
        self._cursor.set_state(state["cursor"])

    def _begin(self, pass_number: int, position: int) -> None:
        dataset = self._dataset
        self._position = position
        self._constant = {"pass": pass_number, "seeds": dataset.seeds, **dataset.fingerprint}
        self._cursor = dataset.open((pass_number,))

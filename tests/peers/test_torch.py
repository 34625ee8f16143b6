import base64
import io
import json
import multiprocessing
import time
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from replicax._src.devices.autoshard import AutoShardPolicy, NotEnoughFilesError, WorkerShare
from replicax._src.input.arrays import UnsupportedElementError
from replicax._src.input.elements import NotResumableError, UnsupportedSourceError, element_spec
from replicax._src.input.opening import open_elements
from replicax._src.input.sources import UnbatchedDatasetError, open_source

pytestmark = [
    # Warnings of torchdata and torch.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning"),
    pytest.mark.filterwarnings("ignore:Sparse CSR tensor support:UserWarning"),
]


class Rows(Dataset):
    """Rows of numbers; it can be sent to other processes."""

    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __len__(self):
        return self.num_rows

    def __getitem__(self, index):
        return {"x": np.full(3, index, np.float32), "y": index}


class Stream(IterableDataset):
    def __init__(self, num_rows):
        self.num_rows = num_rows

    def __iter__(self):
        return iter(range(self.num_rows))


class SizedStream(Stream):
    def __len__(self):
        return self.num_rows


def lists(elements):
    return [np.asarray(element).tolist() for element in elements]


def ys(elements):
    return [element["y"].tolist() for element in elements]


def loader_of(values, **options):
    """A loader of ``values``, one element each."""
    return DataLoader(values, batch_size=None, collate_fn=lambda value: value, **options)


def first_of(value):
    return next(open_elements(loader_of([value])).iterate())


# --- elements -----------------------------------------------------------------------------------------


def test_values_order_and_partial_batches():
    elements = open_elements(DataLoader(Rows(5), batch_size=2))
    for _ in range(2):
        assert ys(elements.iterate()) == [[0, 1], [2, 3], [4]]
    assert elements.cardinality == 3
    assert elements.description == "a torch DataLoader (batch_size 2, 0 workers)"
    element = next(elements.iterate())
    assert isinstance(element["x"], np.ndarray)
    assert element["x"].tolist() == [[0, 0, 0], [1, 1, 1]]


def test_lists_stay_pytrees():
    dataset = TensorDataset(torch.arange(4), torch.ones(4, 2))
    elements = open_elements(DataLoader(dataset, batch_size=2))
    element = next(elements.iterate())
    assert isinstance(element, list)
    assert [array.shape for array in element] == [(2,), (2, 2)]
    assert [spec.shape for spec in element_spec(elements)] == [(None,), (None, 2)]


class Point(NamedTuple):
    x: torch.Tensor
    y: tuple


def test_pytrees():
    point = first_of(Point(torch.arange(2), (torch.zeros(2), None)))
    assert isinstance(point, Point)
    assert isinstance(point.y[0], np.ndarray)
    assert point.y[1] is None


def test_other_mappings_are_dicts():
    import collections

    element = first_of(collections.UserDict(ids=torch.arange(2), more=[torch.zeros(2)]))
    assert isinstance(element, dict)
    assert element["ids"].tolist() == [0, 1]
    assert isinstance(element["more"][0], np.ndarray)


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        (torch.float32, np.float32),
        (torch.float16, np.float16),
        (torch.bfloat16, jnp.bfloat16),
        (torch.float8_e4m3fn, jnp.float8_e4m3fn),
        (torch.float8_e5m2, jnp.float8_e5m2),
        (torch.int64, np.int64),
        (torch.bool, np.bool_),
        (torch.complex64, np.complex64),
    ],
)
def test_dtypes(dtype, expected):
    tensor = torch.tensor([0, 1, 1]).to(dtype)
    array = first_of(tensor)
    assert array.dtype == np.dtype(expected)
    assert array.astype(np.complex64).tolist() == [0, 1, 1]
    scalar_and_matrix = first_of([tensor[:1].reshape(()), tensor.reshape(1, 3).T])
    assert [array.shape for array in scalar_and_matrix] == [(), (3, 1)]


def test_tensors_with_a_gradient_or_a_lazy_conjugate():
    assert first_of(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
    assert first_of(torch.tensor([1 + 2j]).conj()).tolist() == [1 - 2j]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.eye(3).to_sparse(), r"sparse_coo of shape \(3, 3\).*to_dense"),
        (lambda: torch.eye(3).to_sparse_csr(), "sparse_csr"),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
            "nested tensor of 2 rows.*Pad it",
        ),
        (
            lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
            "nested tensor of 2 rows",
        ),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 1.0, 0, torch.qint8), "dequantize"),
        (lambda: ["a", "b"], "text"),
    ],
)
def test_dtypes_unsupported_by_devices(make, text):
    value = {"x": torch.ones(2), "bad": make()}
    with pytest.raises(UnsupportedElementError, match=text):
        first_of(value)


def test_rows_and_datasets_without_a_loader():
    with pytest.raises(UnbatchedDatasetError):
        next(open_source(DataLoader(Stream(3), batch_size=None)).iterate())
    for dataset in (Rows(3), Stream(3)):
        text = f"torch Dataset {type(dataset).__name__}.*batch_size=global_batch_size"
        with pytest.raises(UnsupportedSourceError, match=text):
            open_elements(dataset)


def test_loaders_without_a_batch_size():
    elements = open_elements(DataLoader([torch.arange(2), torch.arange(3)], batch_size=None))
    assert lists(elements.iterate()) == [[0, 1], [0, 1, 2]]
    assert elements.cardinality == 2
    assert "no batch_size" in elements.description


def test_cardinalities():
    assert open_elements(DataLoader(Rows(5), batch_size=2, drop_last=True)).cardinality == 2
    assert open_elements(DataLoader(Stream(5), batch_size=2)).cardinality is None
    assert open_elements(DataLoader(SizedStream(5), batch_size=2)).cardinality == 3
    # Two processes yield all rows twice, each with its own last batch.
    parallel = DataLoader(SizedStream(5), batch_size=2, num_workers=2, multiprocessing_context="spawn")
    assert open_elements(parallel).cardinality is None


def test_workers_of_a_cluster():
    rows = []
    for index in range(2):
        share = WorkerShare(num_workers=2, worker_index=index, num_replicas=2)
        steps = open_source(DataLoader(Rows(7), batch_size=4), share=share).iterate()
        rows.append([row for step in steps for row in step.tree.unflatten(step.arrays)["y"].tolist()])
    assert rows == [[0, 1, 4, 5], [2, 3, 6]]
    with pytest.raises(NotEnoughFilesError, match="a torch DataLoader"):
        open_source(DataLoader(Rows(7), batch_size=4), share=share, policy=AutoShardPolicy.FILE)


# --- positions ----------------------------------------------------------------------------------------


def test_plain_loader_is_not_resumable():
    batches = open_elements(DataLoader(Rows(5), batch_size=2)).iterate()
    with pytest.raises(NotResumableError, match="StatefulDataLoader"):
        batches.get_state()


def stateful(shuffle, num_rows=11, **options):
    generator = torch.Generator().manual_seed(7) if shuffle else None
    return StatefulDataLoader(Rows(num_rows), batch_size=2, shuffle=shuffle, generator=generator, **options)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("num_taken", [0, 2, 6])
@pytest.mark.parametrize("epoch", [0, 1])
def test_a_stateful_loader_is_resumed_in_a_new_one(shuffle, num_taken, epoch):
    elements = open_elements(stateful(shuffle))
    assert elements.description == "a torch StatefulDataLoader (batch_size 2, 0 workers)"
    for _ in range(epoch):
        list(elements.iterate())
    before = elements.iterate()
    for _ in range(num_taken):
        next(before)
    state = json.loads(json.dumps(before.get_state()))
    rest, next_epoch = ys(before), ys(elements.iterate())
    assert len(rest) == 6 - num_taken
    assert shuffle == (next_epoch[0] != [0, 1])

    elements = open_elements(stateful(shuffle))
    after = elements.iterate()
    after.set_state(state)
    assert ys(after) == rest
    assert ys(elements.iterate()) == next_epoch


@pytest.mark.parametrize(
    "make", [stateful, lambda shuffle: DataLoader(Rows(11), batch_size=2, shuffle=shuffle)]
)
def test_inspecting_a_loader_consumes_no_shuffle(make):
    def order(looks):
        torch.manual_seed(5)
        elements = open_elements(make(True))
        if looks:
            element_spec(elements)
        return [ys(elements.iterate()), ys(elements.iterate())]

    assert order(looks=True) == order(looks=False)


def test_empty_state():
    for state in (None, {}, {"version": 1}):
        with pytest.raises(NotResumableError):
            open_elements(stateful(False)).iterate().set_state(state)


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (lambda: StatefulDataLoader(Rows(11), batch_size=4), "batch_size"),
        (lambda: stateful(False, 12), "num_rows"),
        (lambda: stateful(False, 13), "length"),
        (lambda: stateful(True), "samplers"),
        (lambda: stateful(False, num_workers=1), "num_workers"),
        (lambda: StatefulDataLoader(SizedStream(11), batch_size=2), "dataset"),
    ],
)
def test_state_of_another_loader_raises(other, differs):
    before = open_elements(stateful(False)).iterate()
    next(before)
    with pytest.raises(NotResumableError, match=f"its {differs} is"):
        open_elements(other()).iterate().set_state(before.get_state())


def written(states):
    """The written form of a torchdata position."""
    buffer = io.BytesIO()
    torch.save(states, buffer)
    return base64.b64encode(buffer.getvalue()).decode()


@pytest.mark.parametrize(
    "wrong",
    [
        {"iterator": None},
        {"iterator": {}},
        {"iterator": {"torch": ""}},
        {"iterator": {"torch": written({})}},
        {"iterator": {"torch": written(({}, [torch.Generator().get_state()]))}},
        {"iterator": {"torch": written(({"a": 1}, [torch.Generator().get_state()]))}},
        {"iterator": {"torch": written((3, [torch.Generator().get_state()]))}},
        {"iterator": {"torch": written((None, []))}},
        {"iterator": {"torch": written((None, [3]))}},
        {"position": -1},
    ],
)
def test_malformed_states_do_not_change_a_pass_or_its_loader(wrong):
    elements = open_elements(stateful(True))
    before = elements.iterate()
    next(before)
    state = before.get_state()
    rest, next_epoch = ys(before), ys(elements.iterate())

    elements = open_elements(stateful(True))
    for bad in ({**state, **wrong}, {name: state[name] for name in state if name != next(iter(wrong))}):
        with pytest.raises(NotResumableError):
            elements.iterate().set_state(bad)
    one_pass = elements.iterate()
    first = ys([next(one_pass)])
    assert first + ys(one_pass) == ys(open_elements(stateful(True)).iterate())
    after = elements.iterate()
    after.set_state(state)
    assert ys(after) == rest
    assert ys(elements.iterate()) == next_epoch


def test_saved_states_do_not_change():
    batches = open_elements(stateful(True)).iterate()
    states, texts = [], []
    for _ in batches:
        states.append(batches.get_state())
        texts.append(json.dumps(states[-1]))
    assert [json.dumps(state) for state in states] == texts
    assert [state["position"] for state in states] == [1, 2, 3, 4, 5, 6]


def test_simultaneous_passes_have_separate_positions():
    elements = open_elements(stateful(False))
    one = elements.iterate()
    next(one), next(one)
    other = elements.iterate()
    next(other)
    element_spec(elements)
    elements.first()
    states = [one.get_state(), other.get_state()]
    assert [state["position"] for state in states] == [2, 1]
    for state, expected in zip(states, [[4, 5], [2, 3]], strict=True):
        after = open_elements(stateful(False)).iterate()
        after.set_state(state)
        assert next(after)["y"].tolist() == expected


def test_states_that_json_cannot_hold():
    class Odd(Rows):
        def state_dict(self):
            return {"odd": Odd}

        def load_state_dict(self, state):
            pass

    batches = open_elements(StatefulDataLoader(Odd(4), batch_size=2)).iterate()
    next(batches)
    with pytest.raises(NotResumableError, match="weights_only"):
        batches.get_state()


def test_states_of_a_users_dataset():
    class Counting(Rows):
        """Its state contains everything that JSON lacks."""

        loaded = None

        def state_dict(self):
            return {1: (b"\x00\xff", np.arange(3, dtype=np.uint16)), "t": torch.ones(2, dtype=torch.bfloat16)}

        def load_state_dict(self, state):
            Counting.loaded = state

    before = open_elements(StatefulDataLoader(Counting(8), batch_size=2)).iterate()
    next(before)
    state = json.loads(json.dumps(before.get_state()))
    after = open_elements(StatefulDataLoader(Counting(8), batch_size=2)).iterate()
    after.set_state(state)
    assert next(after)["y"].tolist() == [2, 3]
    assert Counting.loaded is not None
    assert Counting.loaded[1][0] == b"\x00\xff"
    assert Counting.loaded[1][1].tolist() == [0, 1, 2]
    assert Counting.loaded["t"].dtype == torch.bfloat16


def test_a_position_through_a_strategy(strategy):
    before = iter(strategy.experimental_distribute_dataset(stateful(True)))
    next(before), next(before)
    state = json.loads(json.dumps(before.get_state()))
    rest = [np.concatenate([np.asarray(part) for part in step["y"].values]).tolist() for step in before]
    after = iter(strategy.experimental_distribute_dataset(stateful(True)))
    after.set_state(state)
    assert [np.concatenate([np.asarray(p) for p in step["y"].values]).tolist() for step in after] == rest
    assert len(rest) == 4


# --- processes ----------------------------------------------------------------------------------------


def wait_for_no_processes():
    deadline = time.monotonic() + 20
    while multiprocessing.active_children() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not multiprocessing.active_children()


@pytest.mark.timeout(120)
def test_a_loader_with_two_processes(strategy):
    loader = DataLoader(Rows(9), batch_size=4, num_workers=2, multiprocessing_context="spawn")
    distributed = strategy.experimental_distribute_dataset(loader)
    assert len(distributed) == 3
    total = 0.0
    for batch in distributed:
        sums = strategy.run(lambda batch: batch["x"].sum(), args=(batch,))
        total += float(strategy.reduce("SUM", sums, axis=None))
    assert total == 3 * sum(range(9))
    del batch, distributed
    wait_for_no_processes()


@pytest.mark.timeout(180)
def test_a_stateful_loader_with_two_processes_is_resumed():
    def make():
        return stateful(False, 12, num_workers=2, multiprocessing_context="spawn")

    before = open_elements(make()).iterate()
    next(before), next(before), next(before)
    state = json.loads(json.dumps(before.get_state()))
    del before
    after = open_elements(make()).iterate()
    after.set_state(state)
    assert ys(after) == [[6, 7], [8, 9], [10, 11]]
    del after
    wait_for_no_processes()


@pytest.mark.timeout(180)
@pytest.mark.parametrize("shuffle", [False, True])
def test_asking_for_the_start_starts_no_processes(shuffle):
    def make():
        return open_elements(stateful(shuffle, 8, num_workers=1, multiprocessing_context="spawn"))

    elements = make()
    before = elements.iterate()
    state = json.loads(json.dumps(before.get_state()))
    assert not multiprocessing.active_children()
    order, next_epoch = ys(before), ys(elements.iterate())
    elements = make()
    after = elements.iterate()
    after.set_state(state)
    assert after.get_state() == state
    assert not multiprocessing.active_children()
    assert [ys(after), ys(elements.iterate())] == [order, next_epoch]
    assert shuffle == (order != next_epoch)
    del before, after, elements
    wait_for_no_processes()


# --- strategies ---------------------------------------------------------------------------------------


def test_through_a_strategy(strategy):
    rows = torch.arange(7, dtype=torch.bfloat16)
    distributed = strategy.experimental_distribute_dataset(
        DataLoader(TensorDataset(rows, 2 * rows), batch_size=4)
    )
    for _ in range(2):
        total = 0.0
        for x, y in distributed:
            products = strategy.run(lambda x, y: (x * y).astype(jnp.float32).sum(), args=(x, y))
            total += float(strategy.reduce("SUM", products, axis=None))
        assert total == 2 * sum(row**2 for row in range(7))
    assert "a torch DataLoader (batch_size 4, 0 workers)" in repr(distributed)

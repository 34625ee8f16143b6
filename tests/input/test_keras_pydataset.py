import json
import logging
import threading
import time

import keras
import numpy as np
import pytest

import replicax as rx
from replicax._src.input.element_specs import INFINITE
from replicax._src.input.elements import EmptyDatasetError, NotResumableError, element_spec
from replicax._src.input.opening import open_elements
from replicax._src.input.sources import UnbatchedDatasetError, open_source


class Squares(keras.utils.PyDataset):
    """``num_rows`` rows in batches; records its calls."""

    def __init__(self, num_rows=5, batch_size=2, **options):
        super().__init__(**options)
        self.rows, self.batch_size = np.arange(num_rows), batch_size
        self.calls = []

    def __len__(self):
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, index):
        self.calls.append(index)
        rows = self.rows[index * self.batch_size :][: self.batch_size]
        return rows, rows**2

    def on_epoch_begin(self):
        self.calls.append("begin")

    def on_epoch_end(self):
        self.calls.append("end")


class Endless(keras.utils.PyDataset):
    num_batches = None

    def __getitem__(self, index):
        return {"x": np.full(2, index)}


def features(elements):
    return [batch[0].tolist() for batch in elements]


def test_values_order_and_epochs():
    dataset = Squares()
    elements = open_elements(dataset)
    assert elements.cardinality == 3
    for _ in range(2):
        assert features(elements.iterate()) == [[0, 1], [2, 3], [4]]
    assert dataset.calls == ["begin", 0, 1, 2, "end"] * 2
    (x, y) = next(elements.iterate())
    assert isinstance(next(elements.iterate()), tuple)
    assert (x.tolist(), y.tolist()) == ([0, 1], [0, 1])


def test_on_epoch_end_is_called_once():
    dataset = Squares(2)
    one_pass = open_elements(dataset).iterate()
    list(one_pass)
    assert next(one_pass, None) is None
    assert dataset.calls.count("end") == 1


def test_abandoned_epoch_has_no_end():
    dataset = Squares()
    next(open_elements(dataset).iterate())
    assert dataset.calls == ["begin", 0]


def test_inspecting_a_dataset_starts_no_epoch():
    dataset = Squares()
    spec = element_spec(open_elements(dataset))
    assert [one.shape for one in spec] == [(None,), (None,)]
    assert dataset.calls == [0]
    with pytest.raises(EmptyDatasetError):
        element_spec(open_elements(Squares(0)))


def test_a_dataset_without_end():
    elements = open_elements(Endless())
    assert elements.cardinality == INFINITE
    batches = elements.iterate()
    assert [next(batches)["x"].tolist() for _ in range(3)] == [[0, 0], [1, 1], [2, 2]]
    assert element_spec(elements)["x"].shape == (None,)


def test_lists_become_tuples():
    class Lists(Squares):
        def __getitem__(self, index):
            return [*super().__getitem__(index), None]

    batch = next(open_elements(Lists()).iterate())
    assert isinstance(batch, tuple)
    assert batch[2] is None


def test_rows_raise():
    class Rows(Squares):
        def __getitem__(self, index):
            return self.rows[index], 1.0

    with pytest.raises(UnbatchedDatasetError):
        next(open_source(Rows()).iterate())


@pytest.mark.parametrize("num_workers", [2, 4])
def test_threads_read_ahead_in_order(num_workers):
    num_threads, most_threads, lock = 0, 0, threading.Lock()

    class Slow(Squares):
        def __getitem__(self, index):
            nonlocal num_threads, most_threads
            with lock:
                num_threads += 1
                most_threads = max(most_threads, num_threads)
            time.sleep(0.02 * (3 - index % 3))
            with lock:
                num_threads -= 1
            return super().__getitem__(index)

    dataset = Slow(24, 2, workers=num_workers, max_queue_size=5)
    elements = open_elements(dataset)
    for _ in range(2):
        assert features(elements.iterate()) == [[row, row + 1] for row in range(0, 24, 2)]
    assert 1 < most_threads <= num_workers
    assert dataset.calls.count("end") == 2
    assert dataset.calls[-1] == "end"


def test_only_the_queue_is_read_ahead():
    dataset = Squares(100, 2, workers=2, max_queue_size=3)
    batches = open_elements(dataset).iterate()
    next(batches)
    time.sleep(0.2)
    assert max(call for call in dataset.calls if call != "begin") <= 3
    next(batches)
    time.sleep(0.2)
    assert max(call for call in dataset.calls if call != "begin") <= 4


def test_threads_end_with_the_epoch_or_when_it_is_dropped():
    def threads():
        return [one for one in threading.enumerate() if one.name.startswith("replicax-pydataset")]

    elements = open_elements(Squares(workers=3))
    batches = elements.iterate()
    next(batches)
    assert threads()
    del batches
    list(elements.iterate())
    deadline = time.monotonic() + 60
    while threads() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not threads()


@pytest.mark.parametrize("workers", [1, 2])
def test_failed_batch_is_requested_again(workers):
    class FailsOnce(Squares):
        has_failed = False

        def __getitem__(self, index):
            if index == 1 and not self.has_failed:
                self.has_failed = True
                raise OSError("no file 1")
            return super().__getitem__(index)

    dataset = FailsOnce(workers=workers)
    batches = open_elements(dataset).iterate()
    first = features([next(batches)])
    with pytest.raises(OSError, match="no file 1"):
        next(batches)
    assert first + features(batches) == [[0, 1], [2, 3], [4]]
    assert [dataset.calls.count(name) for name in ("begin", "end")] == [1, 1]


def test_error_of_a_thread_replaces_its_batch():
    class Broken(Squares):
        def __getitem__(self, index):
            if index == 1:
                raise OSError("no file 1")
            return super().__getitem__(index)

    batches = open_elements(Broken(workers=2)).iterate()
    assert next(batches)[0].tolist() == [0, 1]
    with pytest.raises(OSError, match="no file 1"):
        next(batches)


def test_worker_processes_are_not_started_and_a_warning_says_so(caplog):
    with caplog.at_level(logging.WARNING, logger="replicax"):
        elements = open_elements(Squares(workers=1, use_multiprocessing=True))
        assert features(elements.iterate()) == [[0, 1], [2, 3], [4]]
    assert "workers run as threads" in caplog.text
    assert elements.description == "the PyDataset Squares (read by 1 threads)"


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_a_position_is_resumed_in_a_new_dataset(options):
    before = open_elements(Squares(9, 2, **options)).iterate()
    next(before), next(before)
    state = json.loads(json.dumps(before.get_state()))
    dataset = Squares(9, 2, **options)
    after = open_elements(dataset).iterate()
    after.set_state(state)
    assert features(after) == features(before) == [[4, 5], [6, 7], [8]]
    assert dataset.calls[0] == "begin"
    assert not {0, 1} & set(dataset.calls)
    with pytest.raises(NotResumableError):
        open_elements(Squares(20, 2)).iterate().set_state(state)


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_a_pass_resumed_at_its_end_ends_no_epoch(options):
    before = open_elements(Squares(9, 2, **options)).iterate()
    for _ in range(5):
        next(before)
    state = before.get_state()
    dataset = Squares(9, 2, **options)
    elements = open_elements(dataset)
    after = elements.iterate()
    after.set_state(state)
    assert list(after) == []
    assert dataset.calls == []
    list(elements.iterate())
    assert dataset.calls.count("begin") == dataset.calls.count("end") == 1


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_pass_can_go_back(options):
    dataset = Squares(9, 2, **options)
    one_pass = open_elements(dataset).iterate()
    next(one_pass)
    state = one_pass.get_state()
    next(one_pass), next(one_pass)
    one_pass.set_state(state)
    assert features(one_pass) == [[2, 3], [4, 5], [6, 7], [8]]
    one_pass.set_state(state)
    assert features(one_pass) == [[2, 3], [4, 5], [6, 7], [8]]
    assert dataset.calls.count("begin") == dataset.calls.count("end") == 2


def test_a_dataset_that_changes_its_order_between_epochs():
    class Reversed(Squares):
        def on_epoch_end(self):
            self.rows = self.rows[::-1]

    elements = open_elements(Reversed(4))
    assert [features(elements.iterate()) for _ in range(3)] == [
        [[0, 1], [2, 3]],
        [[3, 2], [1, 0]],
        [[0, 1], [2, 3]],
    ]


@pytest.mark.parametrize("options", [{}, {"workers": 2}])
def test_through_a_strategy(options):
    strategy = rx.MirroredStrategy(["cpu:0", "cpu:1"])
    dataset = Squares(7, 4, **options)
    distributed = strategy.experimental_distribute_dataset(dataset)
    assert len(distributed) == 2
    total = 0
    for x, y in distributed:
        sums = strategy.run(lambda x, y: (y - 2 * x).sum(), args=(x, y))
        total += int(strategy.reduce("SUM", sums, axis=None))
    assert total == sum(row**2 - 2 * row for row in range(7))
    assert dataset.calls.count("begin") == dataset.calls.count("end") == 1

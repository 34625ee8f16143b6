import gc
import itertools
import threading
import time
import traceback

import pytest

from replicax._src.input.prefetch import Prefetcher


def prefetch_threads():
    return [thread for thread in threading.enumerate() if thread.name == "replicax-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_stays():
    assert not prefetch_threads()
    yield
    gc.collect()
    wait_until(lambda: not prefetch_threads())


def wait_until(is_true, timeout_s=5):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


class Counted:
    """0, 1, 2, ..., and how many have been read."""

    def __init__(self):
        self.num_read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num_read += 1
        return self.num_read - 1


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_in_order_and_then_the_end(depth):
    items = Prefetcher(iter(range(20)), depth)
    assert list(items) == list(range(20))
    assert list(items) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_it_reads_ahead_as_far_as_it_may(depth):
    source = Counted()
    items = Prefetcher(source, depth)
    wait_until(lambda: source.num_read == depth)
    time.sleep(0.05)
    assert source.num_read == depth
    next(items)
    wait_until(lambda: source.num_read == depth + 1)
    time.sleep(0.05)
    assert source.num_read == depth + 1


def test_bursts():
    source = Counted()
    items = Prefetcher(source, 6, burst=3)
    wait_until(lambda: source.num_read == 6)
    assert [next(items), next(items)] == [0, 1]
    time.sleep(0.05)
    assert source.num_read == 6  # the thread sleeps on
    assert next(items) == 2
    wait_until(lambda: source.num_read == 9)
    assert [next(items) for _ in range(20)] == list(range(3, 23))
    rest, _ = items.close()
    assert rest == list(range(23, source.num_read))


def failing(message):
    yield 1
    yield 2
    raise ValueError(message)


def test_an_error_comes_where_its_item_would_with_the_sources_traceback():
    items = Prefetcher(failing("row 3 is bad"), 5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="row 3 is bad") as caught:
        next(items)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        next(items)


def test_the_thread_ends_when_nobody_holds_it():
    items = Prefetcher(itertools.count(), 2)
    next(items)
    assert len(prefetch_threads()) == 1
    del items
    wait_until(lambda: not prefetch_threads())


def test_closing_gives_back_what_was_not_taken():
    source = Counted()
    items = Prefetcher(source, 3)
    assert next(items) == 0
    wait_until(lambda: source.num_read == 4)
    rest, error = items.close()
    assert rest == [1, 2, 3]
    assert error is None
    assert not prefetch_threads()
    assert next(source) == 4  # nothing between was lost


def test_closing_keeps_an_error():
    items = Prefetcher(failing("late"), 5)
    next(items)
    wait_until(lambda: not prefetch_threads())
    rest, error = items.close()
    assert rest == [2]
    assert str(error) == "late"


def test_a_source_that_does_not_return_is_waited_for_no_longer_than_said(monkeypatch):
    monkeypatch.setattr("replicax._src.input.prefetch._CLOSE_TIMEOUT_S", 0.1)
    may_go_on = threading.Event()
    items = Prefetcher((may_go_on.wait(10) for _ in range(3)), 1)
    with pytest.raises(TimeoutError, match="has not returned its next element"):
        items.close()
    may_go_on.set()

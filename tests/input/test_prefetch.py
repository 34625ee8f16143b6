import gc
import itertools
import threading
import time
import traceback

import pytest

from replicax._src.input.prefetch import Prefetcher

# Threads of iterators of earlier tests that the garbage collector may not have collected yet.
EARLIER = set()


def prefetch_threads():
    found = [thread for thread in threading.enumerate() if thread.name == "replicax-prefetch"]
    return [thread for thread in found if thread not in EARLIER]


@pytest.fixture(autouse=True)
def no_thread_stays():
    EARLIER.update(prefetch_threads())
    yield
    if prefetch_threads():
        gc.collect()
    wait_until(lambda: not prefetch_threads())


def wait_until(is_true, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.005)


def prefetch(items, depth):
    return Prefetcher(iter(items), lambda: depth)


class Counted:
    """0, 1, 2, ..., and the number of elements read."""

    def __init__(self):
        self.num_read = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.num_read += 1
        return self.num_read - 1


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_items_in_order_and_then_the_end(depth):
    items = prefetch(range(20), depth)
    assert list(items) == list(range(20))
    assert list(items) == []


@pytest.mark.parametrize("depth", [1, 2, 3, 16])
def test_prefetch_reads_ahead_up_to_its_limit(depth):
    source = Counted()
    items = prefetch(source, depth)
    wait_until(lambda: source.num_read == depth)
    time.sleep(0.05)
    assert source.num_read == depth
    num_taken = depth - depth // 2
    for number in range(num_taken):  # the thread is woken when half of them are gone
        time.sleep(0.02)
        assert source.num_read == depth
        assert next(items) == number
    wait_until(lambda: source.num_read == depth + num_taken)
    time.sleep(0.05)
    assert source.num_read == depth + num_taken


def failing(message):
    yield 1
    yield 2
    raise ValueError(message)


def test_error_replaces_its_item_with_the_sources_traceback():
    items = prefetch(failing("row 3 is bad"), 5)
    assert [next(items), next(items)] == [1, 2]
    with pytest.raises(ValueError, match="row 3 is bad") as caught:
        next(items)
    assert "failing" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    with pytest.raises(StopIteration):
        next(items)


def test_thread_ends_when_the_prefetch_is_deleted():
    items = prefetch(itertools.count(), 2)
    next(items)
    assert len(prefetch_threads()) == 1
    del items
    wait_until(lambda: not prefetch_threads())


class Flaky(Counted):
    """Its element 3 cannot be read the first time."""

    def __next__(self):
        if self.num_read == 3:
            self.num_read = 2.5
            raise OSError("try again")
        self.num_read = int(self.num_read + 1) if self.num_read != 2.5 else 4
        return self.num_read - 1


def test_prefetch_continues_after_an_error_if_the_source_does():
    items = prefetch(Flaky(), 4)
    assert [next(items) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="try again"):
        next(items)
    assert [next(items) for _ in range(3)] == [3, 4, 5]
    items.close()


def test_an_error_is_not_repeated_before_it_was_taken():
    class Broken:
        num_calls = 0

        def __iter__(self):
            return self

        def __next__(self):
            self.num_calls += 1
            raise ValueError(self.num_calls)

    source = Broken()
    items = prefetch(source, 8)
    wait_until(lambda: source.num_calls == 1)
    time.sleep(0.05)
    assert source.num_calls == 1
    for number in (1, 2):
        with pytest.raises(ValueError, match=str(number)):
            next(items)
    items.close()


def test_close_wakes_waiting_callers():
    may_go_on = threading.Event()
    items = prefetch((may_go_on.wait(60) for _ in range(3)), 1)
    ended = []
    waiting = threading.Thread(target=lambda: ended.append(list(items)))
    waiting.start()
    time.sleep(0.05)
    threading.Timer(0.1, may_go_on.set).start()
    items.close()
    waiting.join(60)
    assert not waiting.is_alive()


def test_wait_for_a_blocked_source_is_bounded(monkeypatch, caplog):
    monkeypatch.setattr("replicax._src.input.prefetch._CLOSE_TIMEOUT_S", 0.1)
    has_begun, may_go_on = threading.Event(), threading.Event()
    items = prefetch((has_begun.set() or may_go_on.wait(60) for _ in range(3)), 1)
    assert has_begun.wait(60)
    start = time.monotonic()
    items.close()
    assert time.monotonic() - start < 30
    assert "has not returned its next element" in caplog.text
    may_go_on.set()
    assert list(items) == [] or list(items) == []

"""Threads for what waits: an idle one is used again, ends after a while, and all end with ``close``."""

import threading
import time

import pytest

from memory_cluster import eventually
from replicax._ps.client import request_threads
from replicax._ps.client.request_threads import RequestThreads

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def threads():
    threads = RequestThreads("test")
    yield threads
    threads.close()
    threads.join(time.monotonic() + 10)
    assert not threads._threads


def thread_of_call(threads):
    ran = []
    threads.call(lambda: ran.append(threading.current_thread()))
    eventually(lambda: ran)
    return ran[0]


def test_an_idle_thread_is_used_again(threads):
    first = thread_of_call(threads)
    eventually(lambda: threads._idle)
    assert thread_of_call(threads) is first


def test_nothing_waits_for_another_call(threads):
    go, ran = threading.Event(), []
    for n in range(5):
        threads.call(lambda n=n: (go.wait(30), ran.append(n)))
    thread_of_call(threads)
    assert len(threads._threads) == 6
    go.set()
    eventually(lambda: len(ran) == 5)


def test_an_idle_thread_ends_after_a_while(threads, monkeypatch):
    monkeypatch.setattr(request_threads, "_IDLE_S", 0.05)
    thread = thread_of_call(threads)
    thread.join(10)
    assert not thread.is_alive()
    assert not threads._threads
    assert not threads._idle
    assert thread_of_call(threads) is not thread


def test_calls_are_not_lost_while_threads_end(threads, monkeypatch):
    monkeypatch.setattr(request_threads, "_IDLE_S", 0.001)
    ran = []
    for n in range(300):
        threads.call(lambda n=n: ran.append(n))
        time.sleep(0.0009)
    eventually(lambda: len(ran) == 300)
    assert sorted(ran) == list(range(300))


def test_close_ends_idle_threads_at_once_and_busy_ones_after_their_call(threads):
    go, started = threading.Event(), threading.Event()
    threads.call(lambda: (started.set(), go.wait(30)))
    assert started.wait(10)
    idle = thread_of_call(threads)
    eventually(lambda: threads._idle)
    threads.close()
    idle.join(1)
    assert not idle.is_alive()
    threads.join(time.monotonic() + 0.05)
    assert len(threads._threads) == 1  # the busy one
    threads.call(lambda: pytest.fail("it is closed"))
    go.set()
    threads.join(time.monotonic() + 10)
    assert not threads._threads


def test_join_in_a_thread_of_its_own_does_not_wait_for_itself(threads):
    done = threading.Event()

    def end():
        threads.close()
        threads.join(time.monotonic() + 30)
        done.set()

    threads.call(end)
    assert done.wait(5)


def test_a_thread_that_cannot_start_is_told_and_is_not_joined(threads, monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        assert not threads.call(lambda: None)
    threads.join(time.monotonic() + 1)
    thread_of_call(threads)

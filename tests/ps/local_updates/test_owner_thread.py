"""``OwnerThread``: one thread does all work, in order; callers get results and errors, and no wait is without an end."""

import threading

import pytest

from replicax._ps.local_updates.owner_thread import OwnerThread

WAIT_S = 60.0


class Owned:
    """What the thread owns: it notes by which threads it is used."""

    def __init__(self):
        self.done, self.published, self.errors, self.num_ticks, self.users = [], (), [], 0, set()

    def tick(self):
        self.num_ticks += 1
        self.users.add(threading.get_ident())

    def publish(self):
        self.published = tuple(self.done)
        self.users.add(threading.get_ident())

    def fail(self, error):
        self.errors.append(error)


@pytest.fixture
def owned():
    return Owned()


@pytest.fixture
def thread(owned):
    thread = OwnerThread("owner of a test", owned, 0.01)
    yield thread
    thread.end()


def test_work_of_all_threads_is_done_in_order_by_one_and_published_before_the_answer(owned, thread):
    thread.post(lambda: owned.done.append("before the start"))
    thread.start()
    for number in range(50):
        thread.post(lambda number=number: owned.done.append(number))
    assert thread.call(lambda: owned.done.append("last")) is None
    assert owned.published == ("before the start", *range(50), "last")
    assert thread.wait(lambda: owned.num_ticks > 3, WAIT_S)
    thread.end()
    assert len(owned.users) == 1
    assert threading.get_ident() not in owned.users
    assert thread.call(lambda: 7) == 7  # the state is nobody's now


def test_errors_go_to_the_caller_and_those_of_work_without_one_to_the_state(owned, thread):
    thread.start()
    error = ValueError("in the work")

    def fail():
        raise error

    with pytest.raises(ValueError, match="in the work"):
        thread.call(fail)
    assert not owned.errors
    thread.post(fail)
    with pytest.raises(ValueError, match="in the work"):
        thread.wait(fail, WAIT_S)
    assert owned.errors == [error]
    assert thread.call(lambda: 7) == 7


def test_wait_ends_when_it_is_so_or_in_time_and_may_tick_faster(owned):
    thread = OwnerThread("owner of a test", owned, 1000.0)
    thread.start()
    try:
        assert not thread.wait(lambda: False, 0.0)
        assert thread.wait(lambda: owned.num_ticks > 20, WAIT_S, 0.001)
        thread.post(lambda: owned.done.append(1))
        assert thread.wait(lambda: bool(owned.done), WAIT_S)
    finally:
        thread.end()

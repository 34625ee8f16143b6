"""``cache_variable_reads``: the first read is used, in one thread and one program, until the context ends."""

import threading

import pytest

from replicax import errors
from replicax._src.variables.caching import cache_variable_reads, cached_read


class Remote:
    """A variable whose reads are counted."""

    def __init__(self, value):
        self.value = value
        self.num_reads = 0

    def read(self, program=None):
        return cached_read(self, self._fetch, program)

    def _fetch(self):
        self.num_reads += 1
        return self.value


def test_without_caching_every_read_reads():
    v = Remote(1)
    assert [v.read(), v.read()] == [1, 1]
    assert v.num_reads == 2


def test_first_read_is_used_until_the_end_even_after_an_assignment():
    v, w = Remote(1), Remote(2)
    with cache_variable_reads():
        assert v.read() == 1
        v.value, w.value = 5, 6
        assert [v.read(), v.read(), w.read(), w.read()] == [1, 1, 6, 6]
    assert v.read() == 5
    assert (v.num_reads, w.num_reads) == (2, 1)


def test_next_context_reads_again():
    v = Remote(1)
    for value in (1, 2):
        v.value = value
        with cache_variable_reads():
            assert v.read() == value


def test_none_is_a_value():
    v = Remote(None)
    with cache_variable_reads():
        assert [v.read(), v.read()] == [None, None]
    assert v.num_reads == 1


def test_inner_context_has_no_effect():
    v = Remote(1)
    with cache_variable_reads():
        v.read()
        with pytest.raises(errors.InvalidArgumentError, match="cannot be nested"), cache_variable_reads():
            pass
        v.value = 2
        assert v.read() == 1
    assert v.read() == 2


def test_error_ends_caching():
    v = Remote(1)

    def fail():
        with cache_variable_reads():
            raise KeyError(v.read())

    with pytest.raises(KeyError):
        fail()
    v.value = 2
    with cache_variable_reads():
        assert v.read() == 2


def test_failed_read_is_not_kept():
    v = Remote(1)

    def fail():
        raise OSError

    with cache_variable_reads():
        with pytest.raises(OSError):
            cached_read(v, fail)
        assert v.read() == 1


def test_programs_read_for_themselves():
    v, program, other = Remote(1), object(), object()
    with cache_variable_reads():
        assert v.read() == 1
        v.value = 2
        assert v.read(program) == 2
        v.value = 3
        assert [v.read(), v.read(program), v.read(other)] == [1, 2, 3]


def test_holds_for_one_thread():
    v, seen = Remote(1), []
    with cache_variable_reads():
        v.read()
        v.value = 2
        thread = threading.Thread(target=lambda: seen.append(v.read()))
        thread.start()
        thread.join(10)
        assert v.read() == 1
    assert seen == [2]


def test_a_new_variable_does_not_get_the_read_of_one_that_is_gone():
    with cache_variable_reads():
        assert [Remote(i).read() for i in range(200)] == list(range(200))

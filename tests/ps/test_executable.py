"""Computations that came as StableHLO: the memory of returned large results is reused."""

import weakref

import numpy as np
import pytest

from exported import blob
from replicax._ps.programs.executable import Executable

LARGE = np.zeros(1 << 21, np.float32)  # 8 MiB
SMALL = np.zeros(3, np.float32)


def scaled(x, y):
    return x + 1, x * 2, y * 2


@pytest.fixture
def executable():
    return Executable(blob(scaled, LARGE, SMALL), num_kept=1)


def pointers(results):
    return [result.unsafe_buffer_pointer() for result in results]


def test_large_results_reuse_returned_memory(executable):
    results = executable([LARGE, SMALL])
    for number in range(1, 4):
        kept, before = results[0], pointers(results)
        executable.take_back(results)
        results = executable([np.full_like(LARGE, number), np.full_like(SMALL, number)])
        assert pointers(results)[1] == before[1]
        assert (np.asarray(kept) == number).all()  # x + 1 of the call before
        for result, expected in zip(results, (number + 1, number * 2, number * 2), strict=True):
            assert (np.asarray(result) == expected).all()


def test_unreturned_memory_stays(executable):
    results = executable([LARGE, SMALL])
    again = executable([LARGE + 5, SMALL])
    assert [float(result[0]) for result in results] == [1, 0, 0]
    assert [float(result[0]) for result in again] == [6, 10, 0]


def test_held_view_keeps_its_values(executable):
    results = executable([LARGE + 4, SMALL])
    view = np.asarray(results[1])[7:9]
    executable.take_back(results)
    assert float(executable([LARGE + 5, SMALL])[1][0]) == 10
    assert view.tolist() == [8, 8]


def test_freed_memory_is_released(executable):
    results = executable([LARGE, SMALL])
    large = weakref.ref(results[1])
    executable.take_back(results)
    del results
    assert large() is not None
    executable.free()
    assert large() is None
    assert float(executable([LARGE + 5, SMALL])[1][0]) == 10

"""The cache of programs keeps a bounded number of functions that are deleted."""

import functools

from replicax._src.tracing.cache import _MAX_VERSIONS, ProgramCache

NAMES = {"total": [0]}

MAX_DELETED = ProgramCache._max_deleted


def cell(factor):
    """The function of a cell of a notebook, which names a global that lives on."""
    exec(compile(f"def step():\n    return total, {factor}\n", f"<cell {factor}>", "exec"), NAMES)
    return NAMES.pop("step")


def run(cache, function):
    cache.programs_of(function).put((), [], object())


def test_cell_that_is_edited_and_run_many_times_keeps_a_bounded_number_of_programs():
    cache = ProgramCache()
    for factor in range(5 * MAX_DELETED):
        run(cache, cell(factor))
    assert len(cache) <= MAX_DELETED + 1
    for kept in (cache._functions, cache._versions, cache._newest, cache._num_traces, cache._deleted):
        assert len(kept) <= MAX_DELETED + 1
    assert cache.programs_of(cell(5 * MAX_DELETED - 1)).get(()) is not None, "the newest ones are kept"


def test_functions_that_live_keep_their_programs():
    cache = ProgramCache()
    living = [cell(f"-{number}") for number in range(1, 2 * MAX_DELETED)]
    for function in (*living, functools.partial(living[0]), list(living).append):
        run(cache, function)
    for factor in range(2 * MAX_DELETED):
        run(cache, cell(factor))
    assert all(cache.programs_of(function).get(()) is not None for function in living)


def test_equal_functions_that_are_made_for_each_call_share_a_program():
    cache = ProgramCache()
    run(cache, cell(1))
    for _ in range(10):
        assert cache.programs_of(cell(1)).get(()) is not None
    assert len(cache) == 1 <= _MAX_VERSIONS

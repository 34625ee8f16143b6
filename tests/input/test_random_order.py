"""Random orders of rows: each row once, any part without the rest, and positions of older versions."""

import json
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import replicax as rx
from replicax._src.input.random_order import CipherOrder, DrawnOrder, random_order

MANY = 70_000


def whole(order, length):
    parts, start = [], 0
    while start < length:
        parts.append(order.places(start, length - start))
        start += len(parts[-1])
    return np.concatenate(parts)


@given(st.integers(1, 40_000), st.integers(0, 2**40))
@settings(max_examples=30, deadline=None)
def test_computed_order_has_each_row_once(length, seed):
    assert sorted(whole(CipherOrder((seed,), length), length)) == list(range(length))


def test_computed_order_depends_on_all_seeds():
    orders = [tuple(CipherOrder(seeds, MANY).places(0, 50)) for seeds in ((1, 0), (1, 1), (2, 0))]
    assert len(set(orders)) == 3
    assert orders[0] == tuple(CipherOrder((1, 0), MANY).places(0, 50)), "equal seeds, equal orders"


def test_computed_order_looks_random():
    num_seeds, length = 20, 17_000
    orders = np.array([whole(CipherOrder((seed,), length), length) for seed in range(num_seeds)]) / length
    places = np.arange(length) / length
    # Of uniform places: the mean of the products is 1/4, with a deviation of about 1 / (12 sqrt(n)).
    for order in orders:
        assert abs(np.mean(order * places) - 0.25) < 6 / 12 / length**0.5
        assert abs(np.mean(order[1:] * order[:-1]) - 0.25) < 6 / 12 / length**0.5
    # Each row has each tenth of the places equally often: chi-squared over seeds of one row in a hundred.
    counts = np.array(
        [np.bincount((orders[:, n] * 10).astype(int), minlength=10) for n in range(0, length, 20)]
    )
    statistic = np.sum((counts - num_seeds / 10) ** 2 / (num_seeds / 10), axis=1)  # 9 degrees of freedom
    assert abs(statistic.mean() - 9) < 6 * (18 / len(statistic)) ** 0.5


def test_few_rows_are_drawn():
    assert list(random_order((5, 0), 9).places(0, 9)) == list(np.random.default_rng((5, 0)).permutation(9))
    assert isinstance(random_order((5, 0), 2**16), DrawnOrder)


def test_time_and_memory_do_not_grow_with_the_rows(monkeypatch):
    encrypted = []
    real = CipherOrder._encrypted
    monkeypatch.setattr(
        CipherOrder, "_encrypted", lambda self, numbers: encrypted.append(len(numbers)) or real(self, numbers)
    )
    rows = np.broadcast_to(np.int8(0), 10**9)  # no memory of its own
    dataset = rx.data.from_arrays(rows).shuffle(seed=1).batch(100)
    first = iter(dataset)
    next(first)
    position = first.get_state()
    position["cursor"]["given"] = 10**9 - 100
    tracemalloc.start()
    try:
        resumed = iter(dataset)
        resumed.set_state(position)
        assert [len(batch) for batch in resumed] == [100]
        assert tracemalloc.get_traced_memory()[1] < 2**21
    finally:
        tracemalloc.stop()
    assert sum(encrypted) < 50_000


@pytest.mark.parametrize("given", [140, 4060, 69_930])
def test_long_shuffle_resumes_at_its_position(given):
    def dataset():
        return rx.data.from_arrays(np.arange(MANY)).shuffle(seed=3).batch(70)

    whole_pass = np.concatenate(list(dataset()))
    assert sorted(whole_pass) == list(range(MANY))
    iterator = iter(dataset())
    before = [next(iterator) for _ in range(given // 70 + 1)]
    resumed = iter(dataset())
    resumed.set_state(json.loads(json.dumps(iterator.get_state())))
    rest = list(resumed)
    assert np.array_equal(np.concatenate([*before, *rest]), whole_pass)


def test_older_position_keeps_its_order_to_the_end_of_the_epoch():
    def dataset():
        return rx.data.from_arrays(np.arange(MANY)).shuffle(seed=3).repeat(2).batch(MANY // 2)

    iterator = iter(dataset())
    next(iterator)
    state = json.loads(json.dumps(iterator.get_state()))
    del state["cursor"]["of"]["order"]
    resumed = iter(dataset())
    resumed.set_state(state)
    drawn = np.random.default_rng((3, 0, 0, 0)).permutation(MANY)
    assert np.array_equal(next(resumed), drawn[MANY // 2 :])
    again = iter(dataset())
    again.set_state(json.loads(json.dumps(resumed.get_state())))
    assert np.array_equal(next(again), next(resumed))

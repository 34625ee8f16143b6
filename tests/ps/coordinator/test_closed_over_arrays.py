"""Large arrays that scheduled functions close over are sent once, and again when they have changed."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from in_memory_servers import in_memory_strategy
from replicax._ps.worker import runner

JOIN_S = 60.0
SIZE = 100_000


@pytest.fixture
def sent(monkeypatch):
    """A coordinator of one worker, and the number of bytes of each message."""
    with in_memory_strategy() as strategy:
        (worker,) = strategy.session._tasks.workers
        sizes, answer = [], worker.answer

        def noted(message):
            if message.header["op"] in ("closure", "constant"):
                sizes.append((message.header["op"], sum(array.nbytes for array in message.arrays)))
            return answer(message)

        worker.answer = noted
        with rx.coordinator.ClusterCoordinator(strategy) as coordinator:
            yield coordinator, sizes


@pytest.mark.parametrize("kind", [np.asarray, jnp.asarray], ids=["NumPy", "JAX"])
def test_unchanged_arrays_are_sent_once(sent, kind):
    coordinator, sizes = sent
    table, small = kind(np.ones(SIZE, np.float32)), kind(np.ones(2, np.float32))

    def step(x):
        return jnp.sum(table) * x + jnp.sum(small)

    for number in range(6):
        assert coordinator.schedule(step, (np.float32(number),)).fetch(JOIN_S) == SIZE * number + 2
    large = [op for op, size in sizes if size >= 4 * SIZE]
    assert large == ["closure", "constant"], "once along with the function, then for good"


def test_in_place_changes_are_seen(sent):
    coordinator, sizes = sent
    table = np.zeros(SIZE, np.float32)
    view = table.view()
    view.flags.writeable = False

    def step():
        return jnp.max(table) + jnp.max(view)

    values = []
    for number in range(8):
        table[number // 2 * 10] = number // 2  # every second time it is as it was
        values.append(coordinator.schedule(step))
    assert coordinator.fetch(values) == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len([op for op, size in sizes if op == "constant"]) == 4


def test_workers_drop_least_recently_used_arrays_and_get_them_again(sent, monkeypatch):
    coordinator, _ = sent
    monkeypatch.setattr(runner, "_MOST_CONSTANT_BYTES", 3 * 4 * SIZE)
    (worker,) = coordinator.strategy.session._tasks.workers

    def made(number):
        one, other = (np.full(SIZE, number + more, np.float32) for more in (0, 0.5))
        return lambda: one[0] + other[0] + jnp.zeros(number)[:0].sum()  # two that are needed at once

    steps = [made(number) for number in range(1, 4)]
    for _ in range(3):
        for number, step in enumerate(steps, 1):
            assert coordinator.schedule(step).fetch(JOIN_S) == 2 * number + 0.5
    assert sum(array.nbytes for array in worker._runner._constants.values()) <= 4 * 4 * SIZE

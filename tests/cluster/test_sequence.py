"""The sequence of programs, exchanges and reads, in a cluster in memory: who waits in another place than the others."""

import functools
import itertools
import random

import hypothesis
import pytest
from hypothesis import strategies as st

from checks import examples
from replicax.errors import PeerFailureError, ProgramMismatchError
from simulated_tasks import Cluster, Dataset

SOON_S = 3.0
NAME_IN_MESSAGES = {  # the name of a call in messages
    "run": "#0 step",
    "reduce": "strategy.reduce",
    "gather": "strategy.gather",
    "fit": "to start fit",
    "evaluate": "to start evaluate",
    "predict": "to start predict",
    "save": "to agree on copying (checkpoint)",
    "restore": "to agree on opening a checkpoint (checkpoint)",
    "dataset": "to read the next batch of a dataset",
    "on_read": "reading variable 'total'",
}
PAIRS = [pair for pair in itertools.product(NAME_IN_MESSAGES, NAME_IN_MESSAGES) if pair[0] != pair[1]]
LOOPS = {"fit", "evaluate", "predict"}  # they compare their names themselves: see tests/keras/test_workers.py


def make(worker, *names):
    for name in names:
        getattr(worker, name)()


def diverging(first, second, late_s, worker):
    """Makes some calls on both workers, and then the first on worker 0 and the second on worker 1, which is late."""
    make(worker, "run", first, second, "run", second, first, "run", first, first, second, second)
    if worker.number == 1:
        worker.work(late_s)
    make(worker, *[second if worker.number else first] * 50)


@pytest.mark.parametrize(("first", "second"), PAIRS)
def test_workers_in_different_places_are_told_both_places_soon(monkeypatch, first, second):
    workers = Cluster(monkeypatch, [functools.partial(diverging, first, second, 20.0)] * 2).run()
    began = max(worker.waits_from for worker in workers)
    for worker in workers:
        assert type(worker.error) is ProgramMismatchError
        assert 20.0 <= worker.error_at < began + SOON_S
        for number, call in enumerate((first, second)):
            if not {first, second} <= LOOPS:
                (line,) = [line for line in str(worker.error).splitlines() if f"  worker {number}: " in line]
                assert NAME_IN_MESSAGES[call] in line
                assert f"at script.py:{number} in work" in line


@pytest.mark.parametrize("call", NAME_IN_MESSAGES)
def test_worker_that_ends_is_named_at_once(monkeypatch, call):
    def script(worker):
        make(worker, "run", call, call)
        if worker.number == 0:
            make(worker, *[call] * 50)

    waiting, ended = Cluster(monkeypatch, [script] * 2).run()
    assert ended.error is None
    assert type(waiting.error) is PeerFailureError
    assert "worker 1 has ended its program" in str(waiting.error)
    assert waiting.error_at < SOON_S


@pytest.mark.parametrize(
    "call",
    [
        pytest.param(name, marks=() if name in ("run", "fit", "save", "dataset") else pytest.mark.rest)
        for name in NAME_IN_MESSAGES
    ],
)
def test_late_worker_is_no_mismatch(monkeypatch, call):
    """It loads data for 50 s before the call, and for 300 s before the next one."""

    def script(worker):
        make(worker, "run", call)
        for seconds in (50.0, 300.0):
            worker.work(seconds * worker.number)
            make(worker, call, "run")

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert worker.error is None


@pytest.mark.parametrize("call", NAME_IN_MESSAGES)
def test_compiling_for_a_minute_is_no_mismatch(monkeypatch, call):
    def script(worker):
        make(worker, call)
        worker.run(inside_s=60.0 * worker.number)
        make(worker, call)

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert worker.error is None


@pytest.mark.parametrize("call", NAME_IN_MESSAGES)
def test_run_that_still_goes_on_is_no_mismatch(monkeypatch, call):
    """Its collectives have ended, so the other worker has left it."""

    def script(worker):
        make(worker, "run", call)
        worker.run(afterwards_s=30.0 * worker.number)
        make(worker, call)

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert worker.error is None


def test_exchanges_of_other_threads_are_not_in_the_sequence(monkeypatch):
    """A thread reads ahead, and saves are written in the background, at another time on each worker."""

    def script(worker):
        worker.datasets.append(Dataset(worker, read_s=0.7 * worker.number))
        for number in range(20):
            make(worker, "dataset", "run")
            worker.work(((number + worker.number) % 3) * 0.4)
            if number % 4 == 0:
                worker.save(is_asynchronous=True)

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert worker.error is None


def test_exchanges_beside_programs_of_another_thread_are_no_mismatch(monkeypatch):
    """A thread evaluates while the script reads data and saves, in another order on each worker."""

    def script(worker):
        worker.run()
        for _ in range(10):
            is_over = []

            def evaluate(is_over=is_over):
                worker.work(1.5 * worker.number)
                for _ in range(3):
                    worker.reduce()
                    worker.work(0.5)
                is_over.append(True)

            worker.in_background(evaluate)
            make(worker, "dataset", "dataset", "restore", "dataset")
            worker.work(1.0 - worker.number)
            make(worker, "restore")
            while not is_over:
                worker.work(0.1)
            make(worker, "run", "dataset")

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert worker.error is None


def test_data_of_different_lengths_end_together(monkeypatch):
    """The end is a read too, which may take longer than a heartbeat."""

    def script(worker):
        for length in (3 + worker.number, 2 - worker.number, 4):
            dataset, num_taken = Dataset(worker, length, read_s=1.3), 0
            while dataset.take():
                worker.run()
                num_taken += 1
            worker.evaluate()
            worker.num_taken = num_taken

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert (worker.error, worker.num_taken) == (None, 4)


def test_reads_of_another_dataset_are_a_mismatch(monkeypatch):
    def script(worker):
        datasets = [Dataset(worker), Dataset(worker)]
        for dataset in datasets:
            dataset.take()
        worker.run()
        for _ in range(50):
            datasets[worker.number].take()

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert type(worker.error) is ProgramMismatchError
        assert worker.error_at < SOON_S


def test_one_step_more_of_a_dataset_is_a_mismatch(monkeypatch):
    """One worker leaves its loop early, and saves."""

    def script(worker):
        for number in range(50):
            make(worker, "dataset", "run")
            if number == 10 and worker.number == 0:
                break
        worker.save()

    for worker in Cluster(monkeypatch, [script] * 2).run():
        assert type(worker.error) is ProgramMismatchError
        assert "to agree on copying (checkpoint)" in str(worker.error)
        assert worker.error_at < SOON_S


def scripts_of(names, seed, num_workers=3):
    """Scripts of workers that make the same calls, and work for another time before each of them."""

    def script(worker):
        delays = random.Random(f"{seed} {worker.number}")
        for name in names:
            worker.work(delays.choice((0.0, 0.0, 0.1, 0.5, 1.5, 5.0)))
            getattr(worker, name)()

    return [script] * num_workers


@examples(40, short=20)
@hypothesis.given(st.lists(st.sampled_from(list(NAME_IN_MESSAGES)), max_size=25), st.integers(0, 10**6))
def test_equal_sequences_are_never_a_mismatch(names, seed):
    with pytest.MonkeyPatch.context() as monkeypatch:
        for worker in Cluster(monkeypatch, scripts_of(names, seed)).run():
            assert worker.error is None


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(
    st.lists(st.sampled_from(list(NAME_IN_MESSAGES)), min_size=1, max_size=15),
    st.integers(0, 10**6),
    st.data(),
)
def test_call_that_one_worker_skips_never_waits_without_end(names, seed, data):
    """It may go unnoticed only if the next calls are the same, until the others end."""
    skipped = data.draw(st.integers(0, len(names) - 1))
    with pytest.MonkeyPatch.context() as monkeypatch:
        scripts = scripts_of(names, seed)
        (other,) = scripts_of([*names[:skipped], *names[skipped + 1 :]], seed, num_workers=1)
        workers = Cluster(monkeypatch, [*scripts[:2], other]).run()
    kinds = {type(worker.error) for worker in workers}
    assert kinds <= {ProgramMismatchError, PeerFailureError, type(None)}
    if names[skipped] != "dataset":
        assert kinds & {ProgramMismatchError, PeerFailureError}
    failed_at = [worker.error_at for worker in workers if worker.error is not None]
    assert max(failed_at, default=0.0) < max(worker.waits_from for worker in workers) + SOON_S

"""``HungryWorkers`` finds what a loop over all workers finds."""

from hypothesis import given, settings
from hypothesis import strategies as st

from driven_job import queued
from replicax._ps.job.closures import ClosureQueue
from replicax._ps.job.hungry_workers import HungryWorkers
from replicax._ps.job.worker_state import WorkerState

NUM_WORKERS = 5
NUMBERS = st.integers(0, NUM_WORKERS - 1)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("schedule"), st.integers(1, 8)),
        st.tuples(st.sampled_from(("serve", "serve an idle one")), st.integers(1, 8)),
        st.tuples(st.just("end"), NUMBERS),
        st.tuples(st.sampled_from(("end", "lose", "pause", "apply")), NUMBERS),
    ),
    min_size=20,
    max_size=60,
)
MODES = st.sampled_from(
    (
        {},
        {"max_staleness": 0},
        {"max_staleness": 2},
        {"replicas_to_aggregate": 4},
        {"replicas_to_aggregate": 7},
    )
)


class Workers:
    """A queue and its workers, each of which always wants one function more."""

    def __init__(self, options):
        self.queue, self.in_order = ClosureQueue(**options), "max_staleness" not in options
        self.hungry = HungryWorkers(self.queue)
        self.workers = [WorkerState(f"worker {n}") for n in range(NUM_WORKERS)]
        self.waiting = []  # those that may be found, in the order in which they were put there
        for worker in self.workers:
            self.queue.back(worker.name)
            self.put(worker, is_new=True)

    def put(self, worker, *, is_new=False):
        if worker in self.waiting:
            self.waiting.remove(worker)
        num_in_flight = self.queue.in_flight(worker.name)
        self.waiting.insert(len(self.waiting) if num_in_flight or is_new else 0, worker)
        self.hungry.put(worker, num_in_flight, is_new=is_new)

    def load(self, worker):
        return min(self.queue.in_flight(worker.name), 2)

    def serve(self, only_idle):
        """Gives a function to the worker that is found, which a loop over all of them would find too."""
        able = [
            worker
            for worker in self.waiting
            if self.queue.may_take(worker.name) and self.load(worker) < (2 if only_idle else 3)
        ]
        found = self.hungry.next(only_idle=only_idle)
        if not able:
            assert found is None
            return
        assert found in able
        assert self.load(found) == min(self.load(worker) for worker in able)
        if self.in_order:
            assert found is next(worker for worker in able if self.load(worker) == self.load(found))
        assert self.queue.take(found.name) is not None
        self.put(found)

    def step(self, what, number):
        queue = self.queue
        if what == "schedule":
            for _ in range(number):
                queued(queue, "f", None, round_key="v")
        elif what.startswith("serve"):
            for _ in range(number):
                self.serve("idle" in what)
        elif what == "pause":
            queue.resume("why") if number else queue.pause("why")
        elif what == "apply":
            if queue.complete_round is not None:
                queue.rounds.applied(queue.complete_round)
        else:
            worker = self.workers[number]
            if what == "end" and (closure := queue.oldest(worker.name)) is not None:
                queue.finished(worker.name, closure)
                self.put(worker)
            elif what == "lose":
                self.hungry.remove(worker)
                self.waiting.remove(worker)
                queue.lost(worker.name)
                queue.back(worker.name)
                self.put(worker, is_new=True)


@given(MODES, STEPS)
@settings(max_examples=200, deadline=None)
def test_the_worker_that_is_found_is_the_least_busy_one_that_may_take_a_function(options, steps):
    workers = Workers(options)
    for what, number in steps:
        workers.step(what, number)
        workers.step("serve", 1)


def test_of_workers_that_were_too_far_ahead_the_idle_one_is_found_first():
    workers = Workers({"max_staleness": 2})
    queue, hungry, (busy, idle, *slow) = workers.queue, workers.hungry, workers.workers
    workers.step("schedule", 20)
    for worker, num_ended in ((busy, 2), (idle, 3)):
        for _ in range(num_ended):
            queue.finished(worker.name, queue.take(worker.name))
    for worker in (busy, *slow):
        queue.take(worker.name)
    for worker in workers.workers:
        hungry.remove(worker)
    for worker in (busy, idle):
        hungry.put(worker, queue.in_flight(worker.name))
        assert hungry.next(only_idle=False) is None
    for worker in slow:
        queue.finished(worker.name, queue.oldest(worker.name))
    assert hungry.next(only_idle=False) is idle
    hungry.remove(idle)
    assert hungry.next(only_idle=False) is busy

"""The rules of the closure queue, without threads, sockets or clocks."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from driven_job import queued
from replicax._ps.job.closures import CAPACITY, ClosureQueue
from replicax._src.vocabulary.errors import (
    CancelledError,
    InvalidArgumentError,
    RemoteError,
    UnavailableError,
)


def queue_with(*workers, num=0, **options):
    queue = ClosureQueue(**options)
    for worker in workers:
        queue.back(worker)
    for number in range(num):
        queued(queue, "step", number)
    return queue


def numbers(ended):
    return [closure.number for closure, _ in ended]


def taken(queue, worker):
    closure = queue.take(worker)
    return None if closure is None else closure.number


def test_closures_are_taken_in_their_order_by_any_worker():
    queue = queue_with("a", "b", num=4)
    first, second = queue.take("b"), queue.take("a")
    assert (first.number, second.number) == (0, 1)
    assert queue.finished("b", first)
    assert taken(queue, "b") == 2
    assert queue.low == 1
    assert queue.finished("a", second)
    assert queue.low == 2
    assert not queue.is_idle


def test_the_queue_is_bounded_as_tensorflows():
    assert CAPACITY == 256 * 1024
    queue = queue_with("a", num=2, capacity=2)
    assert queue.is_full
    queue.take("a")
    assert not queue.is_full


def test_first_failure_cancels_the_queue_and_is_collected_once():
    queue = queue_with("a", "b", num=4)
    one, two = queue.take("a"), queue.take("b")
    first, second = ValueError("first"), ValueError("second")
    ended = queue.failed("a", one, first)
    assert numbers(ended) == [0, 2, 3]
    assert ended[0][1] is first
    text = "^The corresponding function is cancelled. Please reschedule the function."
    for _, error in ended[1:]:
        with pytest.raises(CancelledError, match=f"{text}.*'step' failed: first"):
            raise error
    assert queue.collect() is None  # 1 is still in flight
    assert queue.has_error
    assert queue.take("a") is None
    assert numbers(queue.failed("b", two, second)) == [1]
    assert queue.collect() is first
    assert queue.collect() is None
    assert queue.is_idle
    assert queued(queue, "step", None).number == 4
    assert queue.low == 4
    assert taken(queue, "b") == 4


def test_closures_that_finish_after_a_failure_count():
    queue = queue_with("a", "b", num=2)
    one, two = queue.take("a"), queue.take("b")
    queue.failed("a", one, ValueError())
    assert queue.finished("b", two)
    assert queue.counts.finished == 1
    assert queue.counts.failed == 1


def test_closures_of_a_lost_worker_are_taken_first_and_in_order():
    queue = queue_with("a", num=4)
    held = [queue.take("a"), queue.take("a")]
    queue.back("b")
    assert queue.lost("a", [held[0]]) == []
    assert [taken(queue, "b") for _ in range(4)] == [0, 1, 2, 3]
    assert queue.take("a") is None
    assert not queue.finished("a", held[0])  # late
    assert queue.failed("a", held[1], ValueError()) == []
    assert queue.num_in_flight == 4
    assert not queue.has_error


def test_nothing_is_taken_while_the_queue_is_paused():
    queue = queue_with("a", num=2)
    flying = queue.take("a")
    queue.pause("ps 0")
    queue.pause("ps 1")
    assert taken(queue, "a") is None
    queued(queue, "step", None)
    assert queue.finished("a", flying)
    queue.resume("ps 0")
    queue.resume("ps 0")
    assert taken(queue, "a") is None
    queue.resume("ps 1")
    assert [taken(queue, "a") for _ in range(3)] == [1, 2, None]


def test_a_lost_workers_closures_are_cancelled_while_a_failure_waits():
    queue = queue_with("a", "b", num=2)
    one, two = queue.take("a"), queue.take("b")
    error = ValueError()
    queue.failed("a", one, error)
    ((closure, cancelled),) = queue.lost("b", [two])
    assert closure is two
    assert isinstance(cancelled, CancelledError)
    assert queue.collect() is error


def test_a_closure_that_kills_workers_fails_after_three():
    queue = queue_with("a", num=2)
    innocent = None
    for deaths in range(1, 4):
        killer, innocent = queue.take("a"), queue.take("a")
        assert (killer.number, innocent.number) == (0, 1)
        ended = queue.lost("a", [killer])
        queue.back("a")
        if deaths < 3:
            assert ended == []
    assert innocent.num_deaths == 0
    assert numbers(ended) == [0, 1]  # the second is cancelled, as what is queued is
    with pytest.raises(RemoteError, match=r"'step'.* 3 .* a"):
        raise ended[0][1]
    assert queue.collect() is ended[0][1]


@pytest.mark.parametrize(("kind", "lives"), [("other", 3), ("step", 10)])
def test_a_closure_of_a_kind_that_has_finished_has_more_lives(kind, lives):
    queue = queue_with("a")
    queued(queue, "first", None, kind)
    queue.finished("a", queue.take("a"))
    queued(queue, "second", None, "step")
    for left in reversed(range(lives)):
        ended = queue.lost("a", [queue.take("a")])
        queue.back("a")
        assert bool(ended) == (left == 0)
    assert queue.has_error


def test_only_closures_of_a_proven_kind_travel_in_groups():
    queue = queue_with("a", num=4)
    queued(queue, "other", None)
    first = queue.take("a")
    assert first.travels_alone  # none of its kind has finished
    assert queue.take("a").travels_alone
    queue.finished("a", first)
    back = queue.take("a")
    assert not back.travels_alone
    queue.returned("a", back)
    assert [queue.take("a").travels_alone for _ in range(3)] == [True, False, True]


def test_no_closure_of_a_group_fails_for_another():
    queue = queue_with("a", num=4)
    queue.finished("a", queue.take("a"))
    together = [queue.take("a") for _ in range(3)]
    assert queue.lost("a", together) == []
    assert [closure.num_deaths for closure in together] == [1, 1, 1]
    for _ in range(8):  # the second one is what kills
        queue.back("a")
        first, killer = queue.take("a"), queue.take("a")
        assert first.travels_alone
        assert killer.travels_alone
        assert queue.lost("a", [killer]) == []
    queue.back("a")
    queue.finished("a", queue.take("a"))
    ended = queue.lost("a", [queue.take("a")])
    assert numbers(ended) == [2, 3]
    assert isinstance(ended[0][1], RemoteError)
    assert isinstance(ended[1][1], CancelledError)


def test_closure_fails_only_for_a_death_it_died_alone():
    queue = queue_with("a", num=3, max_deaths_of_proven=1)
    queue.finished("a", queue.take("a"))
    assert queue.lost("a", [queue.take("a"), queue.take("a")]) == []
    queue.back("a")
    assert numbers(queue.lost("a", [queue.take("a")])) == [1, 2]


def test_worker_lost_between_closures_blames_none():
    queue = queue_with("a", num=1)
    for _ in range(9):
        queue.take("a")
        assert queue.lost("a") == []
        queue.back("a")
    assert taken(queue, "a") == 0


def test_closure_that_could_not_run_is_tried_again():
    queue = queue_with("a", num=2)
    closure = queue.take("a")
    assert queue.returned("a", closure) == []
    assert queue.low == 0
    assert (taken(queue, "a"), closure.num_returns) == (0, 1)
    assert queue.counts.retried == 1


def test_requeued_closure_may_be_half_done_until_it_ends():
    """Its worker may have changed one server, and may still change another."""
    queue = queue_with("a", "b", num=3)
    held = [queue.take("a"), queue.take("b")]
    assert not queue.has_half_done
    queue.lost("a", held[:1])
    queue.returned("b", held[1])
    assert queue.has_half_done
    for _ in held:
        closure = queue.take("b")
        assert queue.has_half_done
        assert queue.finished("b", closure)
    assert not queue.has_half_done
    last = queue.take("b")
    queue.lost("b", [last])
    assert queue.has_half_done
    queue.close()
    assert not queue.has_half_done


def test_waiting_worker_gets_queued_closures():
    queue = queue_with("a", "b", num=2)
    assert taken(queue, "a") == 0
    assert taken(queue, "a") is None  # b has nothing, and there is one
    assert taken(queue, "b") == 1
    queued(queue, "step", None)
    assert taken(queue, "a") == 2


@pytest.mark.parametrize("k", [0, 1, 3])
def test_no_worker_is_more_than_k_closures_ahead_of_the_slowest(k):
    queue = queue_with("fast", "slow", num=20, max_staleness=k)
    slow = queue.take("slow")
    for _ in range(k + 1):
        assert queue.finished("fast", queue.take("fast"))
    assert queue.take("fast") is None
    assert queue.finished("slow", slow)
    assert queue.take("fast") is not None
    assert queue.take("fast") is None


def test_absent_worker_delays_no_other():
    queue = queue_with("fast", "slow", num=20, max_staleness=1)
    for _ in range(2):
        queue.finished("fast", queue.take("fast"))
    assert queue.take("fast") is None
    queue.lost("slow")
    for _ in range(5):
        assert queue.finished("fast", queue.take("fast"))
    queue.back("slow")  # with the slowest that is there, not where it was
    assert queue.finished("fast", queue.take("fast"))
    assert queue.finished("fast", queue.take("fast"))
    assert queue.take("fast") is None


def test_shared_failure_breaks_and_recovers():
    queue = queue_with("a", num=3)
    in_flight = queue.take("a")
    error = UnavailableError("ps 0 died", "ps 0")
    ended = queue.broke(error)
    assert numbers(ended) == [0, 1, 2]
    assert [type(e) for _, e in ended] == [UnavailableError, CancelledError, CancelledError]
    assert queue.collect() is error
    assert queue.collect() is error  # until it is mended
    assert not queue.finished("a", in_flight)
    assert queue.low == 3
    queue.mended()
    assert queue.collect() is None
    assert queued(queue, "step", None).number == 3


def test_close_cancels_all():
    queue = queue_with("a", num=3)
    closure = queue.take("a")
    ended = queue.close()
    assert numbers(ended) == [0, 1, 2]
    assert all(isinstance(error, CancelledError) for _, error in ended)
    assert queue.is_closed
    assert queue.is_idle
    assert not queue.finished("a", closure)
    assert queue.lost("a", [closure]) == []


@pytest.mark.parametrize("options", [{"capacity": 0}, {"max_deaths": 0}, {"max_staleness": -1}])
def test_options_are_checked(options):
    ((name, value),) = options.items()
    with pytest.raises(InvalidArgumentError, match=f"{name} must be at least .*, got {value}"):
        ClosureQueue(**options)


WORKERS = ["a", "b", "c"]
workers = st.sampled_from(WORKERS)


class AnyOrder(RuleBasedStateMachine):
    """Any events in any order, compared with a model that keeps lists of numbers."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.k = None
        self.queue = ClosureQueue(capacity=6)
        self.there, self.ended_here = set(), dict.fromkeys(WORKERS, 0)
        self.line, self.flying, self.outcome, self.closures = [], {}, {}, {}
        self.count, self.first_error = 0, None

    @rule(k=st.sampled_from([None, 0, 1, 2]))
    @precondition(lambda self: not self.count and not self.there)
    def limit(self, k):
        self.k, self.queue = k, ClosureQueue(capacity=6, max_staleness=k)

    def note(self, ended):
        for closure, error in ended:
            assert closure.number not in self.outcome, "ended twice"
            self.outcome[closure.number] = error
            if closure.number in self.line:
                self.line.remove(closure.number)
                assert isinstance(error, CancelledError)

    @rule()
    @precondition(lambda self: not self.queue.has_error and not self.queue.is_full)
    def schedule(self):
        assert queued(self.queue, "f", None).number == self.count
        self.line.append(self.count)
        self.count += 1

    @rule(worker=workers)
    def back(self, worker):
        if worker not in self.there:
            if self.there:
                self.ended_here[worker] = min(self.ended_here[w] for w in self.there)
            self.there.add(worker)
            self.queue.back(worker)

    @rule(target=held, worker=workers)
    @precondition(lambda self: self.there)
    def take(self, worker):
        if worker not in self.there:
            return multiple()
        closure = self.queue.take(worker)
        mine = [number for number, w in self.flying.items() if w == worker]
        if closure is None:
            must_be_had = self.line and not mine and (self.k is None or self.lead(worker, mine) <= self.k)
            assert not must_be_had
            return multiple()
        assert self.first_error is None
        assert closure.number == self.line.pop(0)
        assert self.k is None or self.lead(worker, mine) <= self.k
        self.flying[closure.number] = worker
        self.closures[closure.number] = closure
        was_in_trouble = closure.num_deaths or closure.num_returns
        assert closure.travels_alone == bool(was_in_trouble or not self.queue.counts.finished)
        return (worker, closure)

    def lead(self, worker, mine):
        return self.ended_here[worker] + len(mine) - min(self.ended_here[w] for w in self.there)

    def is_current(self, worker, closure):
        return self.flying.get(closure.number) == worker

    @rule(what=consumes(held))
    def finished(self, what):
        worker, closure = what
        current = self.is_current(worker, closure)
        assert self.queue.finished(worker, closure) == current
        if current:
            del self.flying[closure.number]
            self.note([(closure, None)])
            self.ended_here[worker] += 1

    @rule(what=consumes(held))
    def failed(self, what):
        worker, closure = what
        current = self.is_current(worker, closure)
        error = ValueError(closure.number)
        ended = self.queue.failed(worker, closure, error)
        if not current:
            assert ended == []
            return
        del self.flying[closure.number]
        self.first_error = self.first_error or error
        self.ended_here[worker] += 1
        self.note(ended)
        assert self.outcome[closure.number] is error
        assert self.line == []

    @rule(what=consumes(held))
    def returned(self, what):
        worker, closure = what
        current = self.is_current(worker, closure)
        ended = self.queue.returned(worker, closure)
        assert current or ended == []
        if current:
            self.go_back([closure.number])
            self.note(ended)

    def go_back(self, numbers):
        for number in numbers:
            del self.flying[number]
        self.line[:0] = numbers

    @rule(worker=workers, num_running=st.sampled_from([0, 2, 3]))
    def lost(self, worker, num_running=0):
        """The worker may have been running any closure of the group."""
        mine = [number for number, w in self.flying.items() if w == worker]
        together = [self.closures[number] for number in mine[:num_running]] if len(mine) > 1 else []
        before = [closure.num_deaths for closure in together]
        ended = self.queue.lost(worker, together)
        assert [closure.num_deaths for closure in together] == [deaths + 1 for deaths in before]
        self.there.discard(worker)
        self.go_back(mine)
        self.note(ended)

    @rule()
    def collect(self):
        error = self.queue.collect()
        assert error is (None if self.flying else self.first_error)
        self.first_error = self.first_error if self.flying else None

    @invariant()
    def counts_agree(self):
        queue = self.queue
        open_numbers = [*self.line, *self.flying]
        assert queue.num_queued == len(self.line)
        assert queue.num_in_flight == len(self.flying)
        assert queue.low == min(open_numbers, default=self.count)
        assert queue.has_error == (self.first_error is not None)
        assert sorted([*open_numbers, *self.outcome]) == list(range(self.count))
        assert not (queue.has_error and self.line)

    def teardown(self):
        """After any events, one good worker completes everything."""
        self.back("a")
        for worker in ("b", "c"):
            self.lost(worker)
        self.lost("a")
        self.back("a")
        while closure := self.queue.take("a"):
            self.line.remove(closure.number)
            self.note([(closure, None)])
            assert self.queue.finished("a", closure)
        assert self.queue.is_idle
        assert sorted(self.outcome) == list(range(self.count))
        assert self.queue.low == self.count


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=100, stateful_step_count=40)

"""Which worker gets a function, with what, and what its answer means."""

import pytest

from driven_job import DrivenJob, connected, numbers_of
from replicax._ps.job.actions_out import CloseWorker, MakeProgram, SendToWorker, Settle
from replicax._ps.job.events_in import Answered, Failed, FunctionNeeds, ResourceAdded, Scheduled
from replicax._ps.job.worker_state import WorkerState
from replicax._src.input.dataset import OutOfRangeError
from replicax._src.vocabulary.errors import (
    CancelledError,
    ClosureAbortedError,
    ClosureInputError,
    MessageError,
    RemoteError,
    StaleCoordinatorError,
    UnavailableError,
    UnknownProgramError,
)

PROGRAM = FunctionNeeds(programs=("p",), constants=("c",), num_bytes=8)


def warm(driven, worker="worker 0", num=60):
    """Makes a worker fast, so that it gets many functions."""
    for _ in range(num):
        driven.schedule()
        driven.now += 0.0001
        driven.works({}, worker=worker)


# --- handing out ----------------------------------------------------------------------------------------


def test_idle_workers_get_functions_first_and_then_those_with_one():
    driven = connected(2)
    for _ in range(2):
        driven.schedule()
    assert (len(driven.sent("worker 0")), len(driven.sent("worker 1"))) == (1, 1)
    waiting = driven.schedule()  # nothing was measured, so each gets one
    driven.works({}, worker="worker 1")
    assert driven.sent("worker 1") == [("closure", waiting)]


def test_of_idle_workers_that_which_became_idle_last_gets_the_next_function():
    driven = connected(3)
    for number in (1, 0, 2, 2):
        for _ in range(3):
            driven.schedule()
        for other in {0, 1, 2} - {number}:
            driven.works({}, worker=f"worker {other}")
        driven.works({}, worker=f"worker {number}")
        driven.schedule()
        assert driven.sent(f"worker {number}")
        driven.works({}, worker=f"worker {number}")


@pytest.mark.parametrize(("took_s", "depth"), [(0.0001, 32), (0.0011, 7), (0.003, 2), (0.09, 2), (0.5, 1)])
def test_as_many_functions_are_in_flight_as_end_within_8_ms(took_s, depth):
    worker = WorkerState("worker 0")
    for n in range(1, 200):
        worker.measure(1, (n - 1) * took_s, n * took_s)
    assert worker.depth == depth


def test_a_fast_worker_gets_several_and_a_slow_one_leaves_them_to_others():
    driven = connected()
    warm(driven)
    assert driven.job.statistics()["workers"]["worker 0"]["depth"] > 2
    numbers = [driven.schedule() for _ in range(4)]
    assert numbers_of(driven.sent()) == numbers[:2]  # it answers soon, and takes the next ones together
    driven.works({}, {})
    assert driven.groups() == [numbers[2:]]
    for _ in range(40):
        driven.now += 1.0
        driven.works(*[{}] * len(driven.sent()))
        driven.schedule()
    assert driven.job.statistics()["workers"]["worker 0"]["depth"] == 1


def test_functions_of_a_proven_kind_travel_together_and_others_alone():
    driven = connected()
    warm(driven)
    driven.servers.hooks.pause("test")
    old = [driven.schedule() for _ in range(3)]
    new = [driven.schedule("new") for _ in range(2)]
    more = [driven.schedule() for _ in range(2)]
    assert driven.sent() == []
    driven.servers.hooks.resume("test")
    driven.pass_time(1.0)
    assert driven.groups() == [old, new[:1], new[1:], more]


def test_large_functions_travel_alone_and_little_is_unanswered_in_a_group():
    driven = connected()
    warm(driven)
    driven.servers.hooks.pause("test")
    large = driven.schedule(needs=FunctionNeeds(num_bytes=4097))
    small = [driven.schedule(needs=FunctionNeeds(num_bytes=4096)) for _ in range(9)]
    driven.servers.hooks.resume("test")
    driven.pass_time(1.0)
    # 4,097 + 6 * 4,096 bytes are below the limit of 8 * 4,096; more are sent one by one.
    assert driven.groups() == [[large], small[:6], *([number] for number in small[6:])]


def test_a_lost_worker_may_have_run_any_function_that_travelled_with_the_first():
    driven = connected()
    warm(driven)
    driven.servers.hooks.pause("test")
    numbers = [driven.schedule() for _ in range(3)]
    driven.servers.hooks.resume("test")
    driven.pass_time(1.0)
    assert driven.groups() == [numbers]
    driven.breaks()
    driven.connect(instance="b")
    assert driven.groups() == [[number] for number in numbers[:1]]  # a new connection begins with one
    for _ in range(3):
        driven.works({})
    assert set(numbers) <= set(driven.settled)


def test_low_is_the_number_below_which_all_have_ended():
    driven = connected(2)
    first, second, third = driven.schedule(), driven.schedule(), driven.schedule()
    driven.works({}, worker="worker 1")
    assert driven.outbox["worker 1"][0].what == third
    assert driven.outbox["worker 1"][0].header == {"low": first}
    driven.works({}, worker="worker 0")
    driven.schedule()
    assert driven.outbox["worker 0"][0].header == {"low": third}
    assert second in driven.settled


def test_a_job_that_is_paused_sends_nothing():
    driven = connected()
    driven.servers.hooks.pause("ps 0")
    driven.servers.hooks.pause("ps 1")
    driven.schedule()
    driven.servers.hooks.resume("ps 0")
    driven.schedule()
    assert driven.sent() == []
    driven.servers.hooks.resume("ps 1")
    driven.schedule()
    assert len(driven.sent()) == 1


def test_a_broken_job_fails_all_until_every_reason_is_mended():
    driven = connected()
    hooks = driven.servers.hooks
    running, queued = driven.schedule(), driven.schedule()
    error = UnavailableError("lost", "ps 0")
    hooks.broke(error, "ps 0")
    hooks.broke(error, "ps 1")
    late = driven.schedule()
    assert driven.settled[running].error is error
    assert isinstance(driven.settled[queued].error, CancelledError)
    assert isinstance(driven.settled[late].error, CancelledError)
    driven.works({})  # too late
    hooks.mended("ps 0")
    hooks.mended("ps 2")
    assert driven.ended[driven.wait("idle")].error is error
    hooks.mended("ps 1")
    assert driven.ended[driven.wait("idle")].error is None
    again = driven.schedule()
    driven.works({})
    assert driven.settled[again].error is None


# --- scheduling -----------------------------------------------------------------------------------------


def test_a_function_that_cannot_run_fails_and_cancels_those_that_are_queued():
    driven = DrivenJob()
    queued = driven.schedule()
    error = ClosureInputError("no such iterator")
    number = driven.schedule(error=error)
    assert driven.settled[number].error is error
    assert isinstance(driven.settled[queued].error, CancelledError)
    late = driven.schedule()  # its caller does not know yet
    assert "after this: no such iterator" in str(driven.settled[late].error)
    assert driven.ended[driven.wait("done")].error is error
    assert driven.schedule() not in driven.settled


def test_a_number_that_an_interrupted_caller_has_left_out_is_never_waited_for():
    """Ctrl-C comes between the counting and the event."""
    driven = connected()
    driven.do(Scheduled(3, "f", "f", FunctionNeeds()))
    driven.works({})
    driven.do(Scheduled(5, "f", "f", FunctionNeeds()))
    assert driven.outbox["worker 0"][0].header == {"low": 5}
    driven.works({})
    assert driven.job.statistics()["closures"]["low"] == 6
    assert driven.ended[driven.wait("idle")].error is None


def test_functions_that_are_scheduled_in_the_wrong_order_are_a_bug():
    driven = connected()
    driven.do(Scheduled(3, "f", "f", FunctionNeeds()))
    driven.job.receive(Scheduled(2, "f", "f", FunctionNeeds()), 0.0)
    assert isinstance(driven.job.bug, AssertionError)


def test_many_functions_are_sent_once_each_in_their_order():
    driven = connected(3)
    for _ in range(200):
        driven.schedule()
    order = []
    while any(driven.outbox.values()):
        for worker in sorted(driven.outbox):
            order += numbers_of(driven.sent(worker)[:1])
            driven.now += 0.01
            if driven.outbox[worker]:
                driven.works({}, worker=worker)
    assert sorted(order) == list(range(200))
    assert len(driven.settled) == 200


# --- what is sent before --------------------------------------------------------------------------------


def test_programs_and_constants_are_sent_once_before_the_first_function_on_a_connection():
    driven = connected()
    driven.schedule(needs=PROGRAM)
    assert driven.sent() == [("constant", "c"), ("program", "p"), ("closure", 0)]
    driven.works({}, {}, {})
    driven.schedule(needs=PROGRAM)
    assert driven.sent() == [("closure", 1)]
    driven.breaks()
    driven.connect(instance="b")
    assert driven.sent() == [("constant", "c"), ("program", "p"), ("closure", 1)]


def test_a_program_that_the_worker_has_forgotten_is_sent_again():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, UnknownProgramError("p", "p"))
    assert driven.sent() == [("program", "p"), ("closure", number)]
    driven.works({}, {})
    assert driven.settled[number].error is None
    assert driven.servers.failures == []


def test_a_program_that_the_worker_cannot_load_is_an_error_of_the_function_alone():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    refusal = MessageError("too large")
    driven.works({}, refusal, UnknownProgramError("p", "p"))
    assert driven.settled[number].error is refusal
    assert driven.ended[driven.wait("done")].error is refusal
    other = driven.schedule("g", needs=FunctionNeeds())
    driven.works({})
    assert driven.settled[other].error is None


def test_a_worker_that_asks_forever_for_a_program_is_broken():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {})
    for _ in range(17):
        assert number not in driven.settled
        driven.works(*[{}] * (len(driven.sent()) - 1), UnknownProgramError("p", "p"))
    assert "worker 0 asked 17 times for a program of 'f'" in str(driven.settled[number].error)


def test_a_program_that_a_server_lacks_is_a_failure_of_a_server():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, UnknownProgramError("update", "update"))
    assert driven.servers.failures == [None]
    driven.works({})
    assert driven.settled[number].error is None


# --- programs for the shapes of a worker ----------------------------------------------------------------


def test_a_function_is_traced_for_the_shapes_that_a_worker_has_met_while_others_go_on():
    """The tracing itself happens elsewhere: the job only asks for it, and goes on."""
    driven = connected(2)
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    assert (made.function, made.signature) == (number, "shapes")
    assert driven.sent() == []
    other = driven.schedule()
    driven.works({}, worker="worker 1")
    assert other in driven.settled
    needs = FunctionNeeds(("p", "q"), ("c",), (), 8)
    driven.do(Answered(made.request, needs))
    assert driven.sent() == [("program", "q"), ("closure", number)]
    driven.works({}, {"signature": "shapes"})
    assert driven.settled[number].answer == {"signature": "shapes"}


def test_a_function_that_cannot_be_traced_for_the_last_elements_says_so():
    driven = connected()
    for error, text in (
        (OutOfRangeError("2 elements are left"), "The dataset ended. 2 elements are left"),
        (ValueError("bad"), "bad"),
    ):
        number = driven.schedule(needs=PROGRAM)
        driven.works(*[{}] * (len(driven.sent()) - 1), {"need": "shapes", "end": "The dataset ended."})
        [made] = driven.of(MakeProgram)
        driven.do(Failed(made.request, error))
        assert type(driven.settled[number].error) is type(error)
        assert str(driven.settled[number].error) == text
        driven.wait("done")


def test_an_error_of_tracing_without_a_text_fails_its_function_alone():
    class Unreadable(Exception):
        def __str__(self):
            raise KeyError("text")

    driven = connected()
    number, other = driven.schedule(needs=PROGRAM), driven.schedule()
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    error = Unreadable()
    driven.do(Failed(made.request, error))
    assert "Tracing raised Unreadable, whose text cannot be made: its __str__ raised KeyError" in str(
        driven.settled[number].error
    )
    assert driven.settled[number].error.__cause__ is error
    driven.works({})
    assert driven.settled[other].error is None


def test_a_trace_that_ends_after_the_loss_of_its_worker_sends_nothing_to_the_next_connection():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    driven.breaks()
    driven.connect(instance="b")
    sent = driven.sent()
    driven.do(Answered(made.request, FunctionNeeds(("p", "q"), ("c",), (), 8)))
    assert driven.sent() == sent
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    driven.do(Answered(made.request, FunctionNeeds(("p", "q"), ("c",), (), 8)))
    assert driven.sent() == [("program", "q"), ("closure", number)]


def traced_for_a_lost_worker(needs):
    """A job whose function is on worker 1 when its trace for worker 0 ends, with these needs."""
    driven = connected(2)
    number = driven.schedule(needs=PROGRAM)
    first, second = ("worker 0", "worker 1") if driven.sent("worker 0") else ("worker 1", "worker 0")
    driven.works({}, {}, {"need": "shapes", "end": None}, worker=first)
    [made] = driven.of(MakeProgram)
    driven.breaks(first)
    driven.works({}, {}, worker=second)
    assert driven.sent(second) == [("closure", number)]
    driven.do(Answered(made.request, needs))
    assert driven.sent(second) == [("closure", number)]
    return driven, number, second


def test_the_bytes_of_a_function_that_is_traced_meanwhile_count_as_they_were_sent():
    driven, number, worker = traced_for_a_lost_worker(FunctionNeeds(("p", "q"), ("c",), (), 100))
    driven.works({}, worker=worker)
    assert driven.settled[number].error is None
    assert driven.job._workers._workers[worker].num_bytes_unanswered == 0


@pytest.mark.parametrize("digest", ["p", "q"])
def test_a_program_of_a_function_that_is_traced_meanwhile_is_not_one_that_a_server_lacks(digest):
    driven, number, worker = traced_for_a_lost_worker(FunctionNeeds(("q",), ("c",), (), 8))
    driven.works(UnknownProgramError(digest, digest), worker=worker)
    assert driven.servers.failures == []
    assert driven.sent(worker) == [("program", "q"), ("closure", number)]


def test_a_function_that_has_ended_is_not_traced():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.servers.hooks.broke(UnavailableError("lost", "ps 0"), "ps 0")
    driven.works({}, {}, {"need": "shapes", "end": None})
    assert number in driven.settled
    assert driven.of(MakeProgram) == []


def test_a_trace_that_ends_after_its_function_sends_nothing():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    driven.servers.hooks.broke(UnavailableError("lost", "ps 0"), "ps 0")
    driven.do(Answered(made.request, PROGRAM))
    assert number in driven.settled
    assert driven.of(SendToWorker) == []


def test_a_trace_that_fails_after_the_loss_of_its_worker_does_not_fail_the_next_run():
    driven = connected()
    number = driven.schedule(needs=PROGRAM)
    driven.works({}, {}, {"need": "shapes", "end": None})
    [made] = driven.of(MakeProgram)
    driven.breaks()
    driven.connect(instance="b")
    driven.do(Failed(made.request, ValueError("bad")))
    assert number not in driven.settled


# --- answers --------------------------------------------------------------------------------------------


def test_the_first_failure_cancels_what_is_queued_and_is_raised_once_all_have_ended():
    driven = connected(2)
    first, second, queued = driven.schedule(), driven.schedule(), driven.schedule()
    error = RemoteError("worker 0 failed", "ValueError", "worker 0")
    failure = driven.wait("idle")
    driven.works(error, worker="worker 0")
    assert driven.settled[first].error is error
    assert "'f' failed: worker 0 failed" in str(driven.settled[queued].error)
    assert failure not in driven.ended
    driven.works({}, worker="worker 1")
    assert driven.settled[second].error is None
    assert driven.ended[failure].error is error
    assert driven.ended[driven.wait("idle")].error is None


@pytest.mark.parametrize(("may_come_back", "most"), [(False, 3), (True, 30)])
def test_a_function_that_cannot_reach_a_server_is_tried_again_a_few_times(may_come_back, most):
    driven = connected()
    driven.servers.may_come_back = may_come_back
    number = driven.schedule()
    error = UnavailableError("no route", "ps 1")
    for _ in range(most):
        driven.works(error)
        assert number not in driven.settled
    driven.works(error)
    assert driven.settled[number].error is error
    assert driven.servers.failures == ["ps 1"] * (most + 1)


@pytest.mark.parametrize(
    "error", [ClosureAbortedError("dropped"), RemoteError("dropped", "ClosureAbortedError", "worker 0")]
)
def test_an_aborted_function_is_requeued(error):
    driven = connected()
    number = driven.schedule()
    for _ in range(40):
        driven.works(error)
    driven.works({})
    assert driven.settled[number].error is None


def test_a_worker_of_another_coordinator_breaks_the_job():
    driven = connected()
    running, queued = driven.schedule(), driven.schedule()
    error = StaleCoordinatorError("other")
    driven.works(error)
    assert driven.settled[running].error is error
    assert isinstance(driven.settled[queued].error, CancelledError)


def test_answers_of_one_event_count_in_their_order_up_to_the_workers_own_end():
    driven = connected()
    warm(driven)
    driven.servers.hooks.pause("test")
    numbers = [driven.schedule() for _ in range(4)]
    driven.servers.hooks.resume("test")
    driven.pass_time(1.0)
    driven.works({}, ClosureAbortedError("x"), UnavailableError("gone", ""))
    assert numbers[0] in driven.settled
    assert [each.number for each in driven.of(Settle)] == numbers[:1]
    assert len(driven.of(CloseWorker)) == 1
    driven.connect(instance="b")
    for _ in range(3):
        driven.works({})
    assert set(numbers) <= set(driven.settled)


# --- datasets -------------------------------------------------------------------------------------------


def test_a_function_whose_dataset_a_worker_could_not_make_fails_with_the_reason():
    driven = connected()
    driven.do(ResourceAdded("dataset 0", "dataset", "read"))
    needs = FunctionNeeds(resources=("dataset 0",))
    number = driven.schedule(needs=needs)
    assert driven.sent() == [("resource", "dataset 0"), ("closure", number)]
    driven.works(OSError("no such file"), RemoteError("no dataset", "KeyError", "worker 0"))
    assert "could not make dataset 'dataset 0'" in str(driven.settled[number].error)
    driven.wait("done")
    late = driven.schedule(needs=needs)
    assert isinstance(driven.settled[late].error, ClosureInputError)
    assert driven.sent() == []


def test_a_function_of_an_unknown_dataset_fails_and_the_worker_gets_the_next_one():
    driven = connected()
    number = driven.schedule(needs=FunctionNeeds(resources=("dataset 7",)))
    assert "There is no 'dataset 7' on the workers" in str(driven.settled[number].error)
    driven.wait("done")
    driven.schedule()
    assert driven.sent() == [("closure", number + 1)]


def test_a_program_that_was_refused_once_and_taken_later_is_sent_again_when_it_is_forgotten():
    driven = connected()
    driven.schedule(needs=PROGRAM)
    driven.works({}, MessageError("too large"), UnknownProgramError("p", "p"))
    driven.wait("done")
    number = driven.schedule(needs=PROGRAM)
    assert driven.sent() == [("program", "p"), ("closure", number)]
    driven.works({}, UnknownProgramError("p", "p"))
    assert driven.sent() == [("program", "p"), ("closure", number)]
    driven.works({}, {})
    assert driven.settled[number].error is None


def test_a_worker_that_is_too_far_ahead_waits_for_the_slowest_one():
    driven = connected(2, max_staleness=0)
    driven.schedule()
    driven.schedule()
    driven.works({}, worker="worker 0")
    waiting = [driven.schedule() for _ in range(2)]
    assert driven.sent("worker 0") == []
    driven.works({}, worker="worker 1")
    assert numbers_of(driven.sent("worker 0") + driven.sent("worker 1")) == waiting[::-1]


def test_a_worker_that_is_too_far_ahead_goes_on_when_the_slowest_one_is_lost():
    driven = connected(2, max_staleness=0)
    driven.schedule()
    second = driven.schedule()
    driven.works({}, worker="worker 0")
    driven.schedule()
    driven.breaks("worker 1")
    assert driven.sent("worker 0") == [("closure", second)]

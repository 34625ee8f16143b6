"""Tasks that tolerate failures, on the control channel: members in threads of this process, the controller in another."""

import concurrent.futures
import contextlib
import json
import sys
import threading
import time

import pytest

from checks import message
from epoch_owner import EpochOwner
from replicax._src.cluster import channel as channel_module
from replicax._src.cluster import chief, start
from replicax._src.cluster.channel import ALL_EPOCHS, Channel
from replicax._src.cluster.control_messages import ask, connect, receive, send
from replicax._src.cluster.controller_process import ControllerServer
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.peers import Peers
from replicax._src.cluster.spec import ClusterSpec, Task, split_address
from replicax._src.control.controller import Controller
from replicax._src.wire.security import Security
from replicax._src.wire.sockets import listen
from replicax.errors import (
    ClusterFailureError,
    ClusterStartError,
    PeerFailureError,
    ProgramMismatchError,
)

pytestmark = pytest.mark.timeout(180)
PATIENCE_S = 60  # more than a machine needs that is busy with something else
SECURITY = Security(b"secret")
NAMES = ["worker 0", "worker 1", "worker 2"]


def membership(address, number, names=NAMES):
    others = [f"127.0.0.1:{number}" for number in range(1, len(names))]
    return Membership(ClusterSpec({"worker": [address, *others]}), Task("worker", number))


class Server:
    """A controller in a thread.

    Attributes:
      address: Its address.
      must_end: Set it as if the process that started the controller had ended.
    """

    def __init__(self, linger_s, names, options):
        listener = listen(*split_address("127.0.0.1:0"))
        self.address = f"127.0.0.1:{listener.getsockname()[1]}"
        self.must_end = threading.Event()
        cluster = membership(self.address, 0, names).described
        controller = Controller(names, **options)
        server = ControllerServer(
            controller, listener, SECURITY, cluster, {"coordinator": None}, is_tolerant=True
        )
        self.thread = threading.Thread(target=server.run, args=(self.must_end, linger_s))
        self.thread.start()

    def has_ended(self, within_s=PATIENCE_S):
        self.thread.join(timeout=within_s)
        return not self.thread.is_alive()


@contextlib.contextmanager
def serving(linger_s=0.0, names=NAMES, **options):
    server = Server(linger_s, names, options)
    try:
        yield server
    finally:
        server.must_end.set()
        assert server.has_ended(), "the controller stays behind"


class Member:
    """A task in a thread of its own, in which its script runs; it leaves when the script has ended.

    Attributes:
      channel, peers, owner: Its parts.
      ended: The epochs of which the channel has told the end at once.
    """

    def __init__(self, server, number, min_workers=1, names=NAMES, **limits):
        task = membership(server.address, number, names)
        self.number = number
        self.channel = Channel(task, SECURITY, min_workers=min_workers, **limits)
        self.ended = []
        self.channel.on_end = self.ended.append
        self.peers = Peers(self.channel, task, PATIENCE_S)
        self.owner = EpochOwner(self.channel, number)
        self.channel.connect(time.monotonic() + PATIENCE_S)

    def gather(self, topic, value=None):
        return self.peers.gather(topic, self.number if value is None else value, "to test")

    def die(self):
        """Ends its connection without a word, as the death of its process does."""
        self.channel._is_closed = True
        self.channel._connection.cancel()
        self.channel._thread.join(timeout=PATIENCE_S)
        self.channel._connection.close()


def run(server, *scripts, **options):
    """Runs a script for each task in a thread of its own. Returns what they return, or their errors."""

    def work(number, script):
        member = Member(server, number, names=NAMES[: len(scripts)], **options)
        try:
            member.owner.start()
            return script(member)
        except ClusterFailureError as error:
            return error
        finally:
            member.channel.leave()

    with concurrent.futures.ThreadPoolExecutor(len(scripts)) as pool:
        futures = [pool.submit(work, number, script) for number, script in enumerate(scripts)]
        return [future.result(timeout=PATIENCE_S) for future in futures]


def dies(member):
    member.gather("before")
    member.die()


# --- all-gathers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("victim", [0, 2])
def test_all_gather_of_waiting_tasks_completes_over_the_live_ones_after_a_death(victim):
    def lives(member):
        before = member.gather("before")
        after = member.gather("after")  # it waits when the other one dies, and answers meanwhile
        return list(before), list(after), after.numbers, after.own

    with serving() as server:
        results = run(server, *(dies if number == victim else lives for number in range(3)))
    live = tuple(number for number in range(3) if number != victim)
    for at, number in enumerate(live):
        assert results[number] == ([0, 1, 2], list(live), live, at)


def test_all_gather_of_another_thread_completes_while_the_training_thread_waits_elsewhere():
    def lives(member):
        member.gather("before")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            written = pool.submit(member.peers.gather_once, "written", member.number, "to write")
            until = time.monotonic() + PATIENCE_S
            while not written.done():
                assert time.monotonic() < until
                member.peers.serve()
                time.sleep(0.01)
            return list(written.result())

    with serving() as server:
        assert run(server, lives, dies, lives) == [[0, 2], None, [0, 2]]


def test_only_the_training_thread_answers():
    def works(member):
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            member.channel.epoch_messages.put({"kind": "waits", "members": []})
            pool.submit(member.peers.serve).result(timeout=PATIENCE_S)
            is_left = not member.channel.epoch_messages.empty()
            member.peers.serve()
        return is_left, member.channel.epoch_messages.empty()

    with serving(names=NAMES[:1]) as server:
        assert run(server, works) == [(True, True)]


def test_tasks_gather_before_the_first_epoch():
    with serving() as server:
        members = [Member(server, number) for number in range(3)]
        with concurrent.futures.ThreadPoolExecutor(3) as pool:
            gathered = pool.map(
                lambda member: list(member.peers.gather_once("start", 1, "to start")), members
            )
            assert list(gathered) == [[1, 1, 1]] * 3
        for member in members:
            member.channel.leave()


def test_live_tasks_agree_on_programs_and_a_different_one_is_named():
    def lives(member):
        member.gather("before")
        member.gather("after")
        member.peers.agree("train", "code")
        return member.peers.agree("evaluate", f"code of {member.number}")

    with serving() as server:
        results = run(server, lives, dies, lives)
    for error in (results[0], results[2]):
        assert type(error) is ProgramMismatchError
        assert "worker 0: evaluate" in str(error)
        assert "worker 2: evaluate" in str(error)
        assert "worker 1" not in str(error)


# --- deaths -------------------------------------------------------------------------------------------


def test_leader_is_the_live_task_with_the_lowest_number():
    def lives(member):
        member.gather("before")
        member.gather("after")
        found = member.peers.is_leader, len(member.peers), member.peers.names
        member.gather("found")  # before that nobody leaves
        return found

    with serving() as server:
        results = run(server, dies, lives, lives)
    assert results[1:] == [(True, 3, tuple(NAMES)), (False, 3, tuple(NAMES))]


def test_chief_follows_the_leader(monkeypatch):
    leads = [False]
    monkeypatch.setattr(chief, "_leaders", [])
    assert chief.has_role(True)
    chief.follow_leader(lambda: leads[-1])
    assert not chief.is_chief()
    assert not chief.has_role(True)
    leads.append(True)
    assert chief.is_chief()
    assert chief.has_role(False)


def test_end_of_an_epoch_is_told_at_once_and_the_rest_waits_for_the_training_thread():
    all_are_here = threading.Barrier(3, timeout=PATIENCE_S)

    def dies_later(member):
        all_are_here.wait()
        member.die()

    def lives(member):
        all_are_here.wait()
        until = time.monotonic() + PATIENCE_S
        while 1 not in member.ended:
            assert time.monotonic() < until
            time.sleep(0.01)
        in_old_epoch = member.owner.epochs[-1]
        member.gather("after")
        found = in_old_epoch, member.owner.epochs[-1]
        member.gather("found")  # before that nobody leaves
        return found

    with serving() as server:
        results = run(server, lives, lives, dies_later)
    assert results[:2] == [((1, (0, 1, 2)), (2, (0, 1)))] * 2


def test_error_of_a_task_does_not_end_the_others():
    def raises(member):
        member.gather("before")
        member.channel.report_error("ValueError: a bug")

    def lives(member):
        member.gather("before")
        return list(member.gather("after"))

    with serving() as server:
        assert run(server, raises, lives, lives)[1:] == [[1, 2], [1, 2]]


def test_all_leave_together():
    def ends(member):
        time.sleep(0.1 * member.number)
        member.peers.at_end = member.owner.finish
        member.peers.end()
        return member.owner.stop, member.channel.failure

    with serving() as server:
        assert run(server, ends, ends, ends) == [("over", None)] * 3


def test_run_with_too_few_tasks_is_lost_for_every_thread_at_once():
    def lives(member):
        member.gather("before")
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            elsewhere = pool.submit(member.peers.gather_once, "written", 1, "to write")
            with pytest.raises(PeerFailureError) as own:
                member.gather("after")
            with pytest.raises(PeerFailureError) as other:
                elsewhere.result(timeout=PATIENCE_S)
        with pytest.raises(PeerFailureError):
            member.peers.check()
        return str(own.value) == str(other.value), member.ended[-1], str(own.value)

    with serving() as server:
        results = run(server, lives, lives, dies, min_workers=3)
    for is_same, ended, text in results[:2]:
        assert is_same
        assert ended == ALL_EPOCHS
        assert "2 tasks are left, and `min_workers` is 3: worker 2 is gone." in text


def test_task_that_loses_the_controller_ends():
    with serving(names=NAMES[:1]) as server:
        member = Member(server, 0, names=NAMES[:1])
        member.owner.start()
        member.channel._connection.cancel()
        with pytest.raises(PeerFailureError, match="has lost its connection to the controller"):
            member.gather("after")
        until = time.monotonic() + PATIENCE_S
        while member.owner.stop is None:
            assert time.monotonic() < until
            member.owner.serve()
        assert (member.owner.stop, member.ended) == ("cut_off", [ALL_EPOCHS])
        member.channel.leave()


def test_start_ends_if_a_task_dies_before_the_first_epoch():
    with serving() as server:
        members = [Member(server, number) for number in range(3)]
        members[2].die()
        with pytest.raises(PeerFailureError, match="worker 2 ended before all tasks had started"):
            members[0].owner.start()
        for member in members[:2]:
            member.channel.leave()


# --- steps --------------------------------------------------------------------------------------------


def serves_until_failure(member):
    """A step that waits for the sums of others."""
    while member.channel.wait_for_message(PATIENCE_S):
        member.peers.serve()


def test_tasks_that_run_different_steps_are_named_and_the_world_is_ended():
    def steps(member):
        with member.peers.stepping("fit"):
            pass
        member.gather("between")
        with member.peers.stepping("fit" if member.number else "evaluate"):
            serves_until_failure(member)

    with serving(names=NAMES[:2]) as server:
        results = run(server, steps, steps)
    for error in results:
        assert type(error) is ProgramMismatchError
        assert "worker 0: in its program number 1, step evaluate" in str(error)
        assert "worker 1: in its program number 1, step fit" in str(error)


def test_task_that_ends_while_another_runs_a_step_is_named():
    def ends(member):
        member.peers.at_end = member.owner.finish
        member.peers.end()

    def steps(member):
        with member.peers.stepping("fit"):
            serves_until_failure(member)

    with serving(names=NAMES[:2]) as server:
        results = run(server, ends, steps)
    for error in results:
        assert type(error) is ProgramMismatchError
        assert "worker 0: waiting to end, before its program number 0" in str(error)
        assert "worker 1: in its program number 0, step fit" in str(error)


def test_slow_task_fails_the_run_after_the_limit_and_is_named():
    def waits(member):
        with member.peers.stepping("fit"):
            serves_until_failure(member)

    def is_slow(member):
        with pytest.raises(PeerFailureError):
            serves_until_failure(member)

    with serving(timeout_s=1.5, stall_s=1.0, names=NAMES[:2]) as server:
        error, _ = run(server, waits, is_slow)
    assert type(error) is PeerFailureError
    assert "worker 0 has waited" in str(error)
    assert error.tasks == ("worker 1",)


# --- the controller -----------------------------------------------------------------------------------


def test_controller_outlives_the_process_that_started_it_and_ends_with_the_last_task():
    def first(member):
        member.gather("before")
        member.die()
        server.must_end.set()  # it was the process of worker 0

    def lives(member):
        member.gather("before")
        time.sleep(1.5)  # longer than the controller lingers
        assert member.gather("after").numbers == (1, 2)
        answer = ask(server.address, {"kind": "ping"}, SECURITY, PATIENCE_S)
        member.gather("last")
        return answer["is_ending"], answer["members"]

    with serving(linger_s=0.2) as server:
        assert run(server, first, lives, lives)[1:] == [(False, (1, 2))] * 2
        assert server.has_ended()


def test_controller_ends_although_a_member_of_a_lost_run_stays():
    with serving(linger_s=0.2, names=NAMES[:2]) as server:
        members = [Member(server, number, min_workers=2, names=NAMES[:2]) for number in range(2)]
        members[0].die()
        server.must_end.set()
        assert server.has_ended()
        members[1].channel.leave()


def test_controller_ends_although_a_silent_task_is_connected():
    hello = {"kind": "hello", "member": 0, "min_workers": 1}
    with serving(silence_s=1.0) as server:
        connection = connect(server.address, SECURITY, time.monotonic() + PATIENCE_S)
        hello["cluster"] = membership(server.address, 0).described
        send(connection, hello, time.monotonic() + PATIENCE_S)
        assert receive(connection, time.monotonic() + PATIENCE_S)["epoch"] == 0
        server.must_end.set()
        assert server.has_ended()
        connection.close()


def test_process_that_was_given_up_does_not_disturb_the_one_in_its_place():
    """Its connection stays open: it was stopped, and its host knows nothing of it."""

    def joined(number):
        connection = connect(server.address, SECURITY, time.monotonic() + PATIENCE_S)
        cluster = membership(server.address, 0, NAMES[:2]).described
        hello = {"kind": "hello", "member": number, "cluster": cluster, "min_workers": 1}
        send(connection, hello, time.monotonic() + PATIENCE_S)
        answer = receive(connection, time.monotonic() + PATIENCE_S)
        while answer["kind"] == "refused" and answer["is_temporary"]:
            time.sleep(0.05)
            send(connection, hello, time.monotonic() + PATIENCE_S)
            answer = receive(connection, time.monotonic() + PATIENCE_S)
        assert answer["kind"] == "welcome"
        return connection, answer["epoch"]

    def until(connection, kind):
        while (answer := receive(connection, time.monotonic() + PATIENCE_S))["kind"] != kind:
            pass
        return answer

    with serving(names=NAMES[:2], silence_s=3.0) as server:
        old, epoch = joined(1)
        assert epoch == 0
        send(old, {"kind": "report", "epoch": 0, "version": 0}, time.monotonic() + PATIENCE_S)
        lives = Member(server, 0, names=NAMES[:2])
        lives.owner.start()
        assert until(old, "given_up")
        new, epoch = joined(1)
        assert epoch >= 1
        report = {"kind": "report", "epoch": 0, "version": None}
        send(new, report, time.monotonic() + PATIENCE_S)
        send(old, {"kind": "raised", "text": "it wakes", "status": {}}, time.monotonic() + PATIENCE_S)
        old.close()
        deadline = time.monotonic() + PATIENCE_S
        while lives.owner.member.waiting != (1,):
            assert time.monotonic() < deadline
            send(
                new,
                {"kind": "heartbeat", "status": {"position": -1, "program": None, "doing": "starting"}},
                deadline,
            )
            lives.channel.wait_for_message(0.1)
            lives.owner.serve()
        assert ask(server.address, {"kind": "ping"}, SECURITY, PATIENCE_S)["members"] == (0, 1)
        new.close()
        lives.channel.leave()


# --- starts -------------------------------------------------------------------------------------------


def test_task_with_other_options_is_refused_and_both_are_named():
    with serving() as server:
        first = Member(server, 0, min_workers=2)
        for min_workers, says in ((1, "fault tolerance and min_workers=1"), (None, "no fault tolerance")):
            other = Channel(membership(server.address, 1), SECURITY, min_workers=min_workers)
            expected = ["worker 0 runs with fault tolerance and min_workers=2", f"worker 1 with {says}"]
            message(ClusterStartError, lambda c=other: c.connect(time.monotonic() + PATIENCE_S), *expected)
        first.channel.leave()


class Together:
    """Newcomer and others in threads, of which none makes its first step before the newcomer has entered."""

    def __init__(self, server):
        self.server, self.barrier, self.newcomer = server, threading.Barrier(3), None

    def others(self, number, chief):
        def lives(member):
            member.gather("before")
            member.gather("after")
            own = member.peers.new_topic("data")
            if number == chief:
                member.owner.admit()
            alone = member.peers.gather(own, 1, "to read").numbers, member.gather("between").numbers
            self.barrier.wait(PATIENCE_S)
            member.owner.commit()
            together = member.gather("step")
            return alone, list(together), member.peers.members, member.peers.gather(own, 1, "to read").numbers

        return lives

    def newcomer_of(self, number):
        """The script of a task that dies, and then of its replacement."""

        def dies_and_returns(member):
            dies(member)
            member = Member(self.server, number)
            try:
                assert member.channel.is_newcomer
                own = member.peers.new_topic("data")
                before = [member.gather("its own"), member.peers.gather(own, 1, "to read")]
                member.owner.enter()
                before.append(member.gather("its own"))
                is_leader = member.peers.is_leader
                self.barrier.wait(PATIENCE_S)
                member.owner.commit()
                together = member.gather("step")
                after = member.peers.gather(own, 1, "to read").numbers
                return (
                    [each.numbers for each in before],
                    is_leader,
                    list(together),
                    member.peers.members,
                    after,
                )
            finally:
                member.channel.leave()

        return dies_and_returns


@pytest.mark.parametrize("number", [0, 1])
def test_newcomer_gathers_alone_until_its_first_step_and_then_with_the_others(number):
    others = tuple({0, 1, 2} - {number})
    with serving() as server:
        together = Together(server)
        scripts = [together.others(each, others[0]) for each in range(3)]
        scripts[number] = together.newcomer_of(number)
        results = run(server, *scripts)
    alone = [(number,)] * 3
    assert results[number] == (alone, False, [0, 1, 2], (0, 1, 2), (number,))
    assert [results[each] for each in others] == [((others, others), [0, 1, 2], (0, 1, 2), others)] * 2


@pytest.fixture
def unnoted(monkeypatch):
    """This process joins no cluster for good."""
    monkeypatch.setattr(start, "security_of", lambda: SECURITY)
    monkeypatch.setattr(start, "note_joined", lambda peers: None)
    monkeypatch.setattr(start.atexit, "register", lambda function: None)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(chief, "_leaders", [])


@pytest.mark.parametrize("number", [0, 1])
def test_new_process_of_a_dead_task_joins_the_job_that_runs(number, unnoted):
    with serving() as server:

        def lives(member):
            member.gather("before")
            member.gather("after")
            newcomer = None
            if member.number == 2:
                newcomer = start._LiveCluster(membership(server.address, number), 10.0, 1)
            member.gather("last")
            if newcomer is None:
                return None
            gathered = newcomer.peers.gather("its own", 1, "to test")
            found = newcomer.peers.channel.is_newcomer, chief.is_chief(), gathered.numbers
            newcomer.close()  # it has never entered, and waits for nobody
            return found

        scripts = [lives] * 3
        scripts[number] = dies
        assert run(server, *scripts)[2] == (True, False, (number,))


@pytest.mark.parametrize("number", [0, 1])
def test_replacement_that_comes_after_the_end_starts_no_job_of_its_own(number, unnoted, monkeypatch):
    monkeypatch.setenv(start.REPLACEMENT_VARIABLE, "1")
    monkeypatch.setattr(start, "_REPLACEMENT_START_S", 1.0)
    with serving() as server:
        address = server.address
    assert server.has_ended()
    says = f"worker {number} waited 1 s for worker 0, which does not answer at {address}"
    message(ClusterStartError, lambda: start._LiveCluster(membership(address, number), 10.0, 1), says)


def test_replacement_with_another_cluster_is_refused_at_once_and_both_are_named():
    names = [*NAMES, "worker 3"]
    with serving() as server:

        def lives(member):
            member.gather("before")
            member.gather("after")
            if member.number == 2:
                other = Channel(membership(server.address, 1, names), SECURITY, min_workers=1)
                says = [f"worker 0 at {server.address} refuses worker 1", "belongs to another cluster"]
                message(ClusterStartError, lambda: other.connect(time.monotonic() + PATIENCE_S), *says)
            return list(member.gather("last"))

        assert run(server, lives, dies, lives) == [[0, 2], None, [0, 2]]


def test_newcomer_is_told_of_the_end_also_before_it_has_asked_to_enter():
    with serving() as server:
        arrived = threading.Event()

        def lives(member):
            member.gather("before")
            member.gather("after")
            assert arrived.wait(PATIENCE_S)
            member.owner.finish()

        def dies_and_returns(member):
            dies(member)
            newcomer = Member(server, 1)
            arrived.set()
            assert newcomer.channel.wait_for_message(PATIENCE_S)
            newcomer.owner.serve()
            newcomer.owner.enter()
            newcomer.channel.leave()
            return newcomer.owner.stop

        assert run(server, lives, dies_and_returns, lives) == [None, "over", None]


# --- the launcher -------------------------------------------------------------------------------------


def test_launcher_reads_that_the_others_continue_unless_the_run_is_lost(monkeypatch, tmp_path):
    path = tmp_path / "status.json"

    def tolerates():
        return json.loads(path.read_text())["tolerates_failures"]

    with serving(names=NAMES[:2]) as server:
        made = channel_module.StatusFile
        monkeypatch.setattr(channel_module, "StatusFile", lambda given: made(str(path)))
        member = Member(server, 0, min_workers=2, names=NAMES[:2])
        monkeypatch.setattr(channel_module, "StatusFile", lambda given: made(None))
        other = Member(server, 1, min_workers=2, names=NAMES[:2])
        member.channel._write_status()
        assert not tolerates(), "a death at the start ends the run"
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(other.channel.tell, {"kind": "report", "epoch": 0, "version": 0}).result()
        member.owner.start()
        assert tolerates()
        other.die()
        with pytest.raises(PeerFailureError):
            member.gather("after")
        assert not tolerates()
        member.channel.leave()

"""What the simulated world does to messages and processes."""

import pytest

from simulation.shrinking import fewest
from simulation.world import FOREVER_S, Fault, Process, World


class Listener(Process):
    """Notes what it gets, and when."""

    def __init__(self, world, name):
        super().__init__(world, name)
        self.got, self.accepted = [], []

    def accept(self, connection):
        self.accepted.append(connection)

    def receive(self, connection, message):
        self.got.append((message, round(self.world.now, 3)))

    def closed(self, connection):
        self.got.append(("closed", round(self.world.now, 3)))

    @property
    def messages(self):
        return [message for message, _ in self.got]


def world_of(*names, seed=1, **options):
    world = World(seed, **options)
    for name in names:
        world.start(Listener(world, name))
    world.run(0.1, lambda: False)
    world.last_fault = world.now = 0.1
    return world


def talking(world, one="a", other="b", label="talk"):
    connection = world.processes[one].connect(other, label)
    world.run(1.0, lambda: False)
    return connection


def test_messages_of_one_connection_arrive_in_order_and_those_of_two_do_not():
    world = world_of("a", "b", slow=0.3)
    one, other = talking(world), talking(world)
    for number in range(50):
        one.send(number)
        other.send(-1 - number)
    world.run(10.0, lambda: False)
    messages = world.processes["b"].messages
    assert [message for message in messages if message >= 0] == list(range(50))
    assert [message for message in messages if message < 0] == list(range(-1, -51, -1))
    assert messages != sorted(messages, key=abs)


def test_cut_loses_what_is_on_its_way_and_both_ends_hear_of_it():
    world = world_of("a", "b")
    connection = talking(world)
    connection.send("lost")
    world.inject(Fault(0.0, "cut", ("a", "b")))
    connection.send("too late")
    world.run(10.0, lambda: False)
    assert world.processes["a"].messages == world.processes["b"].messages == ["closed"]


def test_close_comes_after_the_messages():
    world = world_of("a", "b")
    connection = talking(world)
    connection.send("last")
    connection.close()
    world.run(10.0, lambda: False)
    assert world.processes["b"].messages == ["last", "closed"]


@pytest.mark.parametrize(("kind", "of_a"), [("part", []), ("part one way", ["to a"])])
def test_partition_delays_what_is_sent_until_it_heals(kind, of_a):
    world = world_of("a", "b")
    connection = talking(world)
    world.inject(Fault(0.0, kind, ("a", "b"), 5.0))
    connection.send("to b")
    connection.other.send("to a")
    world.run(-1.0, lambda: False)
    assert world.processes["a"].messages == of_a
    assert world.processes["b"].messages == []
    world.run(10.0, lambda: False)
    assert world.processes["b"].messages == ["to b"]
    assert world.processes["a"].messages == ["to a"]


def test_processes_that_are_parted_or_whose_host_is_lost_cannot_be_reached():
    world = world_of("a", "b", "c")
    world.inject(Fault(0.0, "part", ("a", "b"), FOREVER_S))
    world.inject(Fault(0.0, "lose host", ("c",)))
    for name in ("b", "c"):
        world.processes["a"].connect(name, "talk").send("lost")
    world.run(10.0, lambda: False)
    assert world.processes["a"].messages == ["closed"] * 2
    assert world.processes["b"].messages == world.processes["c"].messages == []


def test_paused_process_gets_its_messages_when_it_wakes():
    world = world_of("a", "b")
    connection = talking(world)
    world.inject(Fault(0.0, "pause", ("b",), 3.0))
    connection.send("hello")
    world.run(10.0, lambda: False)
    ((message, at),) = world.processes["b"].got
    assert (message, at) == ("hello", pytest.approx(world.last_fault, abs=0.01))


def test_killed_process_is_heard_of_and_that_of_a_lost_host_is_not():
    for kind, heard in (("kill", ["closed"]), ("lose host", [])):
        world = world_of("a", "b")
        talking(world)
        world.inject(Fault(0.0, kind, ("b",)))
        world.run(10.0, lambda: False)
        assert world.processes["a"].messages == heard
        assert world.processes["b"].exit_code == -9


def test_fault_follows_the_moment_that_it_waits_for():
    world = world_of("a")
    world.plan(Fault(0.5, "kill", ("a",), on="form 2"), World.inject)
    for expected in (None, None, -9):
        world.run(2.0, lambda: False)
        assert world.processes["a"].exit_code == expected
        world.moment("form")


def test_shrinking_keeps_what_is_needed():
    assert fewest(list(range(20)), lambda part: {3, 11} <= set(part)) == [3, 11]
    assert fewest([1, 2], lambda part: True) == []
    assert fewest([7], lambda part: part == [7]) == [7]

"""The log of a store: a random sequence of stores that lead, follow, leave, come back, and get the missing updates."""

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from checks import examples
from replicax._ps.store.log import START, Position, UpdateLog

MAX_BYTES = 100


class Store:
    """The applied updates, in order, and the position."""

    def __init__(self):
        self.updates, self.position = [], START

    def apply(self, position, update):
        assert position.seq == self.position.seq + 1
        self.updates.append((position, update))
        self.position = position

    def become(self, state, position):
        self.updates, self.position = list(state), position


class Stores(RuleBasedStateMachine):
    """Two stores, one of which leads. The other one may be away, lack updates, or have some that no other store has."""

    @initialize()
    def begin(self):
        self.stores, self.leader, self.epoch = [Store(), Store()], 0, 1
        self.is_away, self.num_updates, self.num_states = False, 0, 0
        self.log = UpdateLog(MAX_BYTES)
        self.log.begin(START)

    @property
    def lead(self):
        return self.stores[self.leader]

    @property
    def follower(self):
        return self.stores[1 - self.leader]

    @rule(num_bytes=st.integers(0, 60))
    def update(self, num_bytes):
        """The leader applies an update; a direct follower has it before the log forgets it."""
        self.num_updates += 1
        position = Position(self.epoch, self.lead.position.seq + 1)
        self.lead.apply(position, self.num_updates)
        self.log.append(position, self.num_updates, num_bytes)

    @precondition(lambda self: not self.is_away)
    @rule(data=st.data())
    def follow(self, data):
        """It gets some missing updates, and reports them; or it gets the state, if the log does not reach its
        position."""
        follower = self.follower
        if not self.log.reaches(follower.position):
            self.num_states += 1
            follower.become(self.lead.updates, self.lead.position)
            self.log.begin(self.lead.position)
        else:
            lacking = self.log.after(follower.position.seq)
            for position, update in lacking[: data.draw(st.integers(0, len(lacking)))]:
                follower.apply(position, update)
        if data.draw(st.booleans()):  # else what it says is lost
            self.log.acknowledge(follower.position.seq)

    @rule()
    def go_or_come_back(self):
        self.is_away = not self.is_away

    @rule()
    def die(self):
        """It restarts without data."""
        self.stores[1 - self.leader] = Store()

    @precondition(lambda self: not self.is_away)
    @rule()
    def lead_instead(self):
        """The follower becomes the leader, with the data that it has. The previous leader may have more updates, which
        no store follows."""
        self.leader, self.epoch = 1 - self.leader, self.epoch + 1
        self.log = UpdateLog(MAX_BYTES)
        self.log.begin(self.lead.position)

    @rule()
    def lead_unheard(self):
        """The replaced leader does not know it yet, and orders one more update."""
        if self.epoch > 1 and self.follower.position.epoch == self.epoch - 1:
            self.num_updates += 1
            self.follower.apply(Position(self.epoch - 1, self.follower.position.seq + 1), self.num_updates)

    @invariant()
    def keeps_at_most_so_much(self):
        kept = [update for _, update in self.log.after(-1)]
        assert self.log.num_bytes <= MAX_BYTES or len(kept) == 1
        assert [update for _, update in self.log.after(0)] == kept

    @invariant()
    def same_position_same_contents(self):
        if self.log.reaches(self.follower.position):
            repaired = Store()
            repaired.become(self.follower.updates, self.follower.position)
            for position, update in self.log.after(repaired.position.seq):
                repaired.apply(position, update)
            assert repaired.updates == self.lead.updates


TestStores = Stores.TestCase
TestStores.settings = examples(300, short=100)


def log_of(*sizes):
    log = UpdateLog(MAX_BYTES)
    log.begin(Position(1, 10))
    for n, size in enumerate(sizes):
        log.append(Position(1, 11 + n), f"update {n}", size)
    return log


def test_log_keeps_unacknowledged_updates():
    log = log_of(10, 20, 30)
    assert log.num_bytes == 60
    log.acknowledge(12)
    assert (log.num_bytes, [update for _, update in log.after(0)]) == (30, ["update 2"])
    assert [log.reaches(Position(1, seq)) for seq in (11, 12, 13, 14)] == [False, True, True, False]
    assert not log.reaches(Position(2, 12))  # the same number of another primary
    assert (log.get(13), log.get(12)) == ("update 2", None)


def test_log_that_is_too_large_ends_and_reaches_nothing():
    log = log_of(60, 60)
    assert not log.is_on
    assert (log.after(0), log.num_bytes) == ([], 0)
    assert not log.reaches(Position(1, 12))
    log.append(Position(1, 13), "update", 1)
    assert log.after(0) == []
    log.begin(Position(1, 13))
    assert log.reaches(Position(1, 13))


def test_log_keeps_one_update_of_any_size():
    log = log_of(5 * MAX_BYTES)
    assert log.is_on
    assert log.is_half_full
    log.append(Position(1, 12), "update", 1)
    assert not log.is_on


def test_update_is_charged_when_it_takes_memory_of_its_own():
    log = log_of(0, 0)
    log.charge(11, 40)
    log.charge(11, 30)
    assert log.num_bytes == 30
    log.charge(99, 1000)  # it was acknowledged
    assert log.is_on
    log.charge(12, 80)
    assert not log.is_on

"""The rules of copies of groups: for any loss, delay or repetition, an answered update exists exactly once."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from checks import examples, message
from replicax._ps.client.groups import Groups
from replicax._ps.store.group_rules import GroupRules, Partner, Refusal, View
from replicax._ps.store.log import START, Position, UpdateLog
from replicax._src.vocabulary.errors import UnavailableError
from replicax.errors import InvalidArgumentError

MAX_UPDATES = 6


class Server:
    """A process: the rules, and in place of a store the applied updates, in order, with their closures.

    Args:
      snapshot: The snapshot that it starts from: a position, and the updates until then.
    """

    def __init__(self, task, snapshot=None):
        self.task = task
        self.rules = GroupRules(task)
        self.log, self.is_known = [], False
        self.updates = UpdateLog(MAX_UPDATES)
        self.asked = []  # (place, what it was, what it read) that have no answer
        self.joining = None  # the epoch in which it brings what it has to another
        self.is_restored = snapshot is not None
        if snapshot is not None:
            position, self.log = snapshot[0], list(snapshot[1])
            self.rules.restored(position)

    def apply(self, seq, op):
        self.log.append((seq, op if op not in self.ops else None))

    @property
    def ops(self):
        return {op for _, op in self.log if op is not None}


@dataclasses.dataclass
class Sent:
    to: Server
    what: str
    content: tuple


class World:
    """Two servers with disks, a coordinator, clients, and an unreliable network. Only group 0 is checked."""

    def __init__(self):
        self.servers = [Server(0), Server(1)]
        self.groups = Groups(2)
        self.network, self.reports = [], []
        self.acknowledged, self.num_ops = set(), 0
        self.answered_in = {}
        self.disks, self.said = [None, None], {}
        self.num_resumed = self.num_restarted = 0
        for server in self.servers:
            server.is_known = True
            self.takes_view(server, self.groups.views[0])

    # --- events; each gets a number to choose by ------------------------------------------------------------

    def change(self, n):
        """A client sends a new closure, or an earlier one again."""
        op = n // 2 % (self.num_ops + 1)
        self.num_ops = max(self.num_ops, op + 1)
        self.asks(self.servers[n % 2], op)

    def read(self, n):
        self.asks(self.servers[n % 2], None)

    def asks(self, server, op):
        rules = server.rules
        try:
            place = rules.order(is_change=op is not None)
        except UnavailableError:
            return
        if op is not None:
            server.apply(place.seq, op)
        elif rules.partner is Partner.IN_SYNC:
            server.log.append((place.seq, None))
        if op is not None or rules.partner is Partner.IN_SYNC:
            server.updates.append(rules.position, op, 1)
            if not server.updates.is_on:
                self.gives_up(server)
        server.asked.append((place, op, server.ops, set(self.acknowledged)))
        if rules.partner is Partner.IN_SYNC:
            other = self.servers[rules.view.backup]
            self.network.append(Sent(other, "forward", (server, rules.epoch, rules.position, op)))

    def answer(self, n):
        """A server sends the answers that it may send, in any order."""
        server = self.servers[n % 2]
        if not server.asked:
            return
        place, op, read, acknowledged_before = server.asked[n // 2 % len(server.asked)]
        try:
            if not server.rules.may_answer(place):
                return
        except UnavailableError:
            server.asked.remove((place, op, read, acknowledged_before))
            return
        server.asked.remove((place, op, read, acknowledged_before))
        by = self.answered_in.setdefault(server.rules.epoch, server)
        assert by is server, "two servers have answered in one epoch"
        if op is not None:
            self.acknowledged.add(op)
        else:
            assert acknowledged_before <= read, "what was read is older than what had been acknowledged"
            self.acknowledged |= read  # who has read it counts on it

    def deliver(self, n):
        if self.network:
            self.take(self.network.pop(n % len(self.network)))

    def deliver_twice(self, n):
        if self.network:
            self.take(self.network[n % len(self.network)])

    def drop(self, n):
        if self.network:
            self.network.pop(n % len(self.network))

    def take(self, sent):
        server = sent.to
        if server in self.servers and self.hears(server):
            getattr(self, f"takes_{sent.what}")(server, *sent.content)

    def hears(self, server):
        """True if it got a hello, or started from a snapshot and works for the coordinator of that."""
        return server.is_known or server.is_restored

    def takes_forward(self, server, sender, epoch, position, op):
        rules = server.rules
        replication = rules.forwarded(epoch, position.seq)
        if replication is True:
            if op is None:
                server.log.append((position.seq, None))
            else:
                server.apply(position.seq, op)
            rules.applied(position)
        said = replication if isinstance(replication, Refusal) else position.seq
        self.network.append(Sent(sender, "said", (epoch, said)))

    def takes_said(self, server, epoch, said):
        if isinstance(said, Refusal):
            server.rules.refused(epoch, said)
            return
        if epoch == server.rules.epoch:
            server.updates.acknowledge(said)
        server.rules.acknowledge(epoch, said)

    def takes_view(self, server, view):
        rules, was_primary = server.rules, server.rules.is_primary
        try:
            is_new = rules.take(view)
        except InvalidArgumentError:
            self.groups.refused(view)
            # It started from a snapshot after this was decided; or the coordinator did not know all of it.
            assert view.since is not None or (server.is_restored and rules.view is None), (
                f"{view}: it has not all"
            )
            return
        if not is_new:
            return
        server.joining = None
        if not rules.is_primary:
            server.updates.end()
        elif not was_primary:
            server.updates.begin(rules.position)
        if view.since is not None and rules.is_primary:
            self.num_restarted += 1
            self.acknowledged &= server.ops  # the rest is lost
        if rules.partner is Partner.JOINING:
            server.joining = view.epoch
            self.network.append(Sent(self.servers[view.backup], "where", (server, view.epoch)))

    # The data that the primary sends to a joining server: the missing updates, or the state and the updates after it.

    def takes_where(self, server, sender, epoch):
        if server.rules.takes_copy(epoch):
            self.network.append(Sent(sender, "place", (epoch, server.rules.position)))

    def takes_place(self, server, epoch, position):
        if server.joining != epoch:
            return
        other, state = self.servers[server.rules.view.backup], None
        if not server.updates.reaches(position):
            position, state = server.rules.position, tuple(server.log)
            server.updates.begin(position)
        self.network.append(Sent(other, "copy", (server, epoch, position, state)))

    def takes_copy(self, server, sender, epoch, position, state):
        rules = server.rules
        if not rules.takes_copy(epoch) or (state is None and rules.position != position):
            return
        assert rules.has_copy(epoch, position)
        if state is None:
            self.num_resumed += 1
        else:
            server.log = list(state)
        self.network.append(Sent(sender, "copied", (epoch, position)))

    def takes_copied(self, server, epoch, position):
        if server.joining != epoch:
            return
        server.joining = None
        if not server.updates.is_on or not server.updates.reaches(
            position
        ):  # another state was begun meanwhile
            server.rules.lose(epoch)
        elif server.rules.synced(epoch, position.seq):
            other = self.servers[server.rules.view.backup]
            for place, op in server.updates.after(position.seq):
                self.network.append(Sent(other, "forward", (server, epoch, place, op)))

    def gives_up(self, server):
        """The backup lacks more than the log keeps."""
        server.rules.lose(server.rules.epoch)
        server.joining = None

    def loses(self, n):
        """A server finds that it cannot reach the other one."""
        server = self.servers[n % 2]
        server.rules.lose(server.rules.epoch)
        if server.rules.partner is Partner.FAILED:
            server.joining = None

    def snapshot(self, n):
        server = self.servers[n % 2]
        if server.log:
            self.disks[server.task] = (server.rules.position, tuple(server.log))

    def die(self, n):
        """It is restarted at once, with the data on its disk."""
        self.servers[n % 2] = Server(n % 2, self.disks[n % 2])

    def die_without_disk(self, n):
        self.disks[n % 2] = None
        self.die(n)

    def notice(self, n):
        """The coordinator sees that a server is another process; otherwise it may think the server dead although it is
        not."""
        server = self.servers[n % 2]
        self.follow(self.groups.server_lost(server.task))
        self.said.pop(server.task, None)
        if not server.is_known:
            server.is_known = True
            self.said[server.task] = server.rules.position
            self.groups.returned(server.task, {"0": server.rules.described()})

    def both_die(self, n):
        """Both are restarted, and the coordinator sees it, in some order."""
        for task in (n, n + 1):
            self.die(task)
        for task in (n // 2, n // 2 + 1):
            self.notice(task)
        self.restart(n // 4)

    def all_arrives(self, n):
        while self.network:
            self.deliver(0)

    def is_back(self, n):
        """A server joins, and the coordinator learns of it."""
        self.join(n)
        self.all_arrives(n)
        for task in range(2):
            self.report(task)
        while self.reports:
            self.hear(0)

    def restart(self, n):
        """The coordinator uses the existing servers; sometimes without waiting for the other one."""
        views = self.groups.restart([0] if n % 2 else [])
        for view in views:
            if view.group == 0:
                assert view.since == max(self.said.values()), "another one has more"
                assert len(self.said) == 2 or not n % 2
        self.follow(views)

    def report(self, n):
        server = self.servers[n % 2]
        if server.is_known:
            self.reports.append((server, {"0": server.rules.described()}))

    def hear(self, n):
        """A report arrives, perhaps late, also from a process that has been replaced."""
        if self.reports:
            server, parts = self.reports.pop(n % len(self.reports))
            if server in self.servers:
                self.said[server.task] = Position(*parts["0"]["position"])
                self.groups.back(server.task)
                self.follow(self.groups.status_received(server.task, parts))
                self.follow(self.groups.views_to_send(server.task, parts))

    def join(self, n):
        server = self.servers[n % 2]
        if server.is_known:
            self.follow(self.groups.join(server.task))

    def follow(self, views):
        for view in views:
            if view.group == 0:
                for task in view.members:
                    if self.hears(
                        self.servers[task]
                    ):  # at once, or never: the coordinator waits for the answer
                        self.network.append(Sent(self.servers[task], "view", (view,)))

    # --- invariants -----------------------------------------------------------------------------------------

    def check(self):
        view = self.groups.views[0]
        lead = self.servers[view.primary]
        if lead.is_known and 0 not in self.groups.lost and lead.rules.epoch == view.epoch:
            assert self.acknowledged <= lead.ops, "what was acknowledged is not on the primary"
        if 0 not in self.groups.unprotected and view.backup is not None:
            backup = self.servers[view.backup]
            if backup.is_known:
                assert self.acknowledged <= backup.ops, "what was acknowledged is not on the backup"
        for server in self.servers:
            ops = [op for _, op in server.log if op is not None]
            assert len(ops) == len(set(ops)), "applied twice"
        first, second = self.servers
        if first.rules.position == second.rules.position:
            assert first.log == second.log, "the same position, and other contents"

    def heal(self):
        """From now on nothing fails: in the end there are two copies again, and a client gets its answer."""
        for _ in range(12):
            for task in range(2):
                if not self.servers[task].is_known:
                    self.notice(task)
                self.join(task)
                self.report(task)
            while self.reports:
                self.hear(0)
            self.restart(0)
            self.settle()
            for server in self.servers:  # what it waits for was lost before: a stream that broke says so
                if server.joining is not None or (server.asked and server.rules.partner is Partner.IN_SYNC):
                    self.loses(server.task)
            for server in self.servers:
                server.asked = [each for each in server.asked if each[0].tenure == server.rules._tenure]

    def settle(self):
        """All messages arrive, and every allowed answer is sent."""
        for task in range(2):
            self.change(2 * self.num_ops + task)
        self.all_arrives(0)
        for server in self.servers:
            for n in reversed(range(len(server.asked))):
                self.answer(2 * n + server.task)


ACTIONS = [
    *["change"] * 3,
    "read",
    *["answer"] * 3,
    *["deliver"] * 8,
    "deliver_twice",
    "drop",
    "loses",
    *["snapshot"] * 5,
    *["die"] * 2,
    "die_without_disk",
    *["notice"] * 2,
    *["both_die", "restart", "all_arrives"],
    *["is_back"] * 2,
    *["report"] * 2,
    *["hear"] * 2,
    "join",
]


ACTION = st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40))


@examples(400, short=120)
@given(st.lists(ACTION, max_size=20) | st.lists(ACTION, min_size=40, max_size=80))
def test_answered_updates_exist_exactly_once(actions):
    world = World()
    for name, number in actions:
        getattr(world, name)(number)
        world.check()
    world.network = [sent for sent in world.network if sent.what == "view"]
    world.heal()
    world.check()
    if 0 in world.groups.lost:
        assert 0 in world.groups.hopeless
        assert all(server.rules.position == START for server in world.servers), "something was left"
    else:
        assert 0 not in world.groups.unprotected, [server.rules.described() for server in world.servers]
        before = len(world.acknowledged)
        world.settle()
        assert len(world.acknowledged) > before


# The rules one by one, for cases that random events rarely reach.


def rules_of(task, *views):
    rules = GroupRules(task)
    for view in views:
        assert rules.take(view)
    return rules


PAIR = View(0, 1, 0, 1)


def part(epoch, backup="none", position=START):
    return {"epoch": epoch, "backup": backup, "position": position}


def test_new_primary_accepts_nothing_from_the_previous_one():
    backup = rules_of(1, PAIR)
    assert backup.forwarded(1, 1) is True
    backup.applied(Position(1, 1))
    assert backup.forwarded(1, 1) is False
    assert backup.forwarded(1, 3) is Refusal.INCOMPLETE
    backup.take(View(0, 2, 1, None))
    assert backup.forwarded(1, 2) is Refusal.DEPOSED
    joined = rules_of(1, PAIR, View(0, 3, 0, 1, is_joining=True))
    assert joined.forwarded(1, 1) is Refusal.INCOMPLETE  # the same primary, which has not heard of it yet
    assert joined.forwarded(3, 1) is Refusal.INCOMPLETE
    assert joined.has_copy(3, Position(0, 0))
    assert joined.forwarded(1, 1) is Refusal.INCOMPLETE  # late, of the epoch before
    assert joined.forwarded(4, 1) is Refusal.INCOMPLETE
    assert joined.forwarded(3, 1) is True


def test_updates_of_an_earlier_epoch_are_not_answered_later():
    """A server that is the primary, is replaced, and is the primary again has not carried out the earlier request."""
    rules = rules_of(0, PAIR)
    place = rules.order()
    rules.take(View(0, 3, 1, 0, is_joining=True))
    message(UnavailableError, lambda: rules.may_answer(place), "does not serve")
    assert rules.has_copy(3, Position(2, 5))
    rules.take(View(0, 4, 0, None))
    message(UnavailableError, lambda: rules.may_answer(place), "does not serve")
    assert rules.may_answer(rules.order())


def test_backup_counts_once_it_confirmed_every_answered_update():
    rules = rules_of(0, PAIR, View(0, 2, 0, None), View(0, 3, 0, 1, is_joining=True))
    assert all(rules.may_answer(rules.order()) for _ in range(4))
    assert rules.synced(3, acked=2)
    assert rules.described()["backup"] == Partner.JOINING
    assert not rules.may_answer(rules.order())
    rules.acknowledge(1, 9)  # of another epoch
    assert rules.described()["backup"] == Partner.JOINING
    rules.acknowledge(3, 4)
    assert rules.described()["backup"] == Partner.IN_SYNC
    rules.lose(3)
    assert rules.described()["backup"] == Partner.LOST


def test_no_server_gets_an_impossible_role():
    joins = rules_of(1, PAIR, View(0, 2, 0, 1, is_joining=True))
    message(InvalidArgumentError, lambda: joins.take(View(0, 3, 1, None)), "lacks updates of group 0")
    followed = rules_of(0, PAIR)
    followed.refused(1, Refusal.DEPOSED)
    message(UnavailableError, followed.order, "ps 0 does not serve this group")
    message(InvalidArgumentError, lambda: followed.take(View(0, 3, 0, None)), "lacks updates of group 0")


def test_primary_is_decided_once_and_is_never_a_copy_that_is_behind():
    groups = Groups(3)
    assert [view.members for view in groups.views] == [(1, 0), (2, 1), (0, 2)]
    assert [(v.group, v.epoch, v.primary, v.backup) for v in groups.server_lost(1)] == [
        (0, 2, 0, None),
        (1, 2, 2, None),
    ]
    assert groups.primaries == [0, 2, 2]
    assert groups.unprotected == [0, 1]
    assert [(v.group, v.epoch, v.backup, v.is_joining) for v in groups.join(1)] == [
        (0, 3, 1, True),
        (1, 3, 1, True),
    ]
    assert groups.server_lost(2) == [View(2, 2, 0, None)]
    assert groups.lost == [1]  # what joins has not all
    groups.back(2)
    assert groups.lost == []
    assert groups.status_received(2, {"1": part(2, "in sync")}) == []  # of an epoch before
    assert groups.status_received(2, {"1": part(3, "in sync")}) == []
    assert groups.unprotected == [0, 2]
    assert groups.status_received(0, {"0": part(3, "failed")}) == [View(0, 4, 0, None)]
    assert groups.views_to_send(0, {"0": {"epoch": 3}}) == [View(0, 4, 0, None), View(2, 2, 0, None)]


def test_server_with_a_snapshot_leads_only_if_the_view_accepts_it():
    """The coordinator that made it the primary may not have known that it was restarted."""

    def restored():
        rules = GroupRules(1)
        rules.restored(Position(1, 5))
        return rules

    for wrong in (View(0, 2, 1, None), View(0, 2, 1, None, since=Position(1, 6)), View(0, 2, 0, 1)):
        message(InvalidArgumentError, lambda wrong=wrong: restored().take(wrong), "lacks updates")
    leads = restored()
    assert leads.take(View(0, 2, 1, None, since=Position(1, 5)))
    leads.order()
    assert leads.position == Position(2, 6)
    assert leads.take(View(0, 3, 1, 0, is_joining=True))
    joins = restored()
    assert joins.take(View(0, 2, 0, 1, is_joining=True))
    assert joins.has_copy(2, Position(1, 5))
    assert View.of(View(0, 2, 1, None, since=Position(1, 5)).described()).since == Position(1, 5)


def lost_group():
    """Group 0: ps 0 led, then ps 1 alone, and ps 1 does not answer."""
    groups = Groups(2)
    groups.server_lost(0)
    groups.server_lost(1)
    assert groups.lost == [0, 1]
    return groups


def has(seq, epoch=1):
    return {"0": part(epoch, position=Position(epoch, seq))}


def test_lost_group_resumes_from_the_newer_copy_when_the_last_primary_has_restarted():
    groups = lost_group()
    groups.returned(0, has(9))
    assert groups.restart() == []  # ps 1 may only be silent
    groups.back(1)
    assert 0 not in groups.lost
    groups.server_lost(1)
    groups.returned(1, has(7))
    groups.back(1)
    assert 0 in groups.lost
    groups = Groups(2)
    groups.server_lost(0)
    groups.join(0)
    groups.server_lost(1)
    groups.returned(1, has(7))
    assert groups.views_to_send(1, {}) == groups.join(0) == []
    assert groups.server_lost(0) == []  # nobody leads whom that would leave alone
    groups.returned(0, has(9))
    assert (
        groups.status_received(1, {"0": part(3, position=Position(1, 7))}) == []
    )  # as the process before said
    assert groups.restart([0]) == [View(0, 4, 0, None, since=Position(1, 9))]
    assert groups.lost == [1]
    assert groups.join(1) == []  # ps 0 has not said that it leads
    groups.status_received(0, {"0": part(4, position=Position(1, 9))})
    assert groups.join(1) == [View(0, 5, 0, 1, is_joining=True)]


def test_copy_that_differs_does_not_lead_before_it_is_copied_again():
    groups = Groups(2)
    groups.status_received(1, has(9))
    differs = {**part(1, "lost", Position(1, 9)), "differs": True}
    assert groups.status_received(0, {"0": differs}) == [View(0, 2, 0, None)]
    groups.status_received(1, has(9))
    groups.server_lost(0)
    groups.returned(0, has(7))
    assert groups.restart() == [View(0, 3, 0, None, since=Position(1, 7))]
    groups.status_received(0, {"0": part(3, position=Position(1, 7))})
    assert groups.join(1) == [View(0, 4, 0, 1, is_joining=True, is_differing=True)]
    groups.server_lost(1)
    groups.returned(1, has(9))  # from a snapshot that it took before it was copied
    assert groups.join(1)[0].is_differing
    groups.status_received(0, {"0": part(6, "in sync", Position(3, 8))})
    groups.status_received(1, has(8, epoch=3))
    groups.server_lost(1)
    groups.returned(1, has(8, epoch=3))
    groups.server_lost(0)
    groups.returned(0, has(7))
    groups.status_received(1, has(8, epoch=3))  # what it said before the loss counts no more
    assert groups.restart() == [View(0, 8, 1, None, since=Position(3, 8))]


def test_group_whose_only_copy_differs_is_hopeless():
    groups = Groups(2)
    groups.status_received(0, {"0": {**part(1, "lost", Position(1, 9)), "differs": True}})
    groups.server_lost(0)
    groups.returned(0, {})
    groups.status_received(1, has(9))
    assert groups.restart() == []
    assert 0 in groups.hopeless


def test_other_server_of_a_lost_group_is_waited_for():
    groups = lost_group()
    groups.returned(1, has(7))
    assert groups.restart([0]) == []
    assert groups.hopeless == []
    assert groups.restart() == [View(0, 3, 1, None, since=Position(1, 7))]
    groups.refused(View(0, 2, 1, None, since=Position(1, 7)))  # an earlier one
    assert 0 not in groups.lost
    groups.refused(groups.views[0])
    groups.returned(0, has(3, epoch=2))  # a later epoch
    assert groups.restart() == [View(0, 4, 0, None, since=Position(2, 3))]


def test_lost_group_without_any_copy():
    groups = lost_group()
    groups.returned(1, {})
    assert groups.restart() == groups.hopeless == []
    groups.returned(0, {})
    assert groups.restart([0]) == []
    assert groups.hopeless == [0, 1]


def test_process_that_has_nothing_is_not_the_primary_of_a_position():
    fresh = GroupRules(1)
    message(
        InvalidArgumentError, lambda: fresh.take(View(0, 3, 1, None, since=Position(1, 50))), "lacks updates"
    )
    assert not fresh.is_primary
    assert fresh.take(View(0, 4, 0, 1, is_joining=True))


def test_process_that_missed_the_first_view_lacks_updates():
    """It began with the snapshots of other groups, and the coordinator does not know yet that it restarted."""
    fresh = GroupRules(0)
    message(InvalidArgumentError, lambda: fresh.take(View(0, 2, 0, None)), "lacks updates")
    assert not fresh.is_primary
    assert GroupRules(0).take(View(0, 1, 0, 1))

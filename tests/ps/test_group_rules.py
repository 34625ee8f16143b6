"""The rules of copies of groups: whatever is lost, late or comes twice, what was answered is there, and once."""

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from checks import examples, message
from replicax._src.ps.errors import UnavailableError
from replicax._src.ps.group_rules import GroupRules, Partner, Refusal, View
from replicax._src.ps.groups import Groups
from replicax._src.ps.log import Position
from replicax.errors import InvalidArgumentError


class Server:
    """A process: the rules, and in place of a store the log of what was applied, and of which closures that was."""

    def __init__(self, task):
        self.task = task
        self.rules = GroupRules(task)
        self.log, self.is_known = [], False
        self.asked = []  # (place, what it was, what it read) that have no answer
        self.joining = None  # (epoch, what came meanwhile) while it brings what it has to another

    def apply(self, seq, op):
        self.log.append((seq, op if op not in [done for _, done in self.log] else None))

    @property
    def ops(self):
        return {op for _, op in self.log if op is not None}


@dataclasses.dataclass
class Sent:
    to: Server
    what: str
    content: tuple


class World:
    """Two servers, a coordinator, clients, and a network that does what it likes. Group 0 is looked at."""

    def __init__(self):
        self.servers = [Server(0), Server(1)]
        self.groups = Groups(2)
        self.network, self.reports = [], []
        self.acknowledged, self.num_ops = set(), 0
        self.answered_in = {}
        self.is_down = [False, False]
        for server in self.servers:
            server.is_known = True
            server.rules.take(self.groups.views[0])

    # --- what happens; each is given a number, to choose by -----------------------------------------------

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
        server.asked.append((place, op, server.ops, set(self.acknowledged)))
        if rules.partner is Partner.IN_SYNC:
            other = self.servers[rules.view.backup]
            self.network.append(Sent(other, "forward", (server, rules.epoch, place.seq, op)))
        elif server.joining is not None and op is not None:
            server.joining[1].append((place.seq, op))

    def answer(self, n):
        """A server answers what it may, in any order."""
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
        server, rules = sent.to, sent.to.rules
        if (
            server not in self.servers or not server.is_known
        ):  # another process, or nobody has said hello to it
            return
        if sent.what == "view":
            self.takes_view(server, *sent.content)
        elif sent.what == "forward":
            sender, epoch, seq, op = sent.content
            verdict = rules.forwarded(epoch, seq)
            if verdict is True:
                if op is None:
                    server.log.append((seq, None))
                else:
                    server.apply(seq, op)
                rules.applied(Position(epoch, seq))
            said = verdict if isinstance(verdict, Refusal) else seq
            self.network.append(Sent(sender, "said", (epoch, said)))
        elif sent.what == "said":
            epoch, said = sent.content
            if isinstance(said, Refusal):
                rules.refused(epoch, said)
            else:
                rules.acknowledge(epoch, said)
        elif sent.what == "copy":
            sender, epoch, seq, log = sent.content
            if rules.takes_copy(epoch):
                assert rules.has_copy(epoch, Position(0, seq))
                server.log = list(log)
                self.network.append(Sent(sender, "copied", (epoch, seq)))
        elif sent.what == "copied":
            self.has_brought(server, *sent.content)

    def takes_view(self, server, view):
        try:
            is_new = server.rules.take(view)
        except InvalidArgumentError:
            raise AssertionError(f"{view} was decided for one that has not all") from None
        if not is_new:
            return
        server.joining = None
        if view.backup == server.task and view.is_joining:
            server.log = []
        elif server.rules.partner is Partner.JOINING:
            server.joining = (view.epoch, [])
            other = self.servers[view.backup]
            copy = (server, view.epoch, server.rules.seq, tuple(server.log))
            self.network.append(Sent(other, "copy", copy))

    def has_brought(self, server, epoch, seq):
        if server.joining is None or server.joining[0] != epoch:
            return
        _, waiting = server.joining
        server.joining = None
        if server.rules.synced(epoch, seq):
            other = self.servers[server.rules.view.backup]
            for seq, op in waiting:
                self.network.append(Sent(other, "forward", (server, epoch, seq, op)))

    def loses(self, n):
        """A server finds that the other one cannot be reached."""
        server = self.servers[n % 2]
        server.rules.lose(server.rules.epoch)
        if server.rules.partner is Partner.FAILED:
            server.joining = None

    def die(self, n):
        self.servers[n % 2] = Server(n % 2)

    def notice(self, n):
        """The coordinator sees that a server is another process; without that, it may think it dead though it is not."""
        server = self.servers[n % 2]
        self.follow(self.groups.gone(server.task))
        if not server.is_known and 0 not in self.groups.lost:
            server.is_known = True

    def report(self, n):
        server = self.servers[n % 2]
        if server.is_known:
            self.reports.append((server, {"0": server.rules.described()}))

    def hear(self, n):
        """A report arrives, late perhaps; of a process that another one has followed, too."""
        if self.reports:
            server, parts = self.reports.pop(n % len(self.reports))
            if server in self.servers or self.servers[server.task].is_known:
                self.groups.back(server.task)
                self.follow(self.groups.told(server.task, parts))
                self.follow(self.groups.to_be_told(server.task, parts))

    def join(self, n):
        server = self.servers[n % 2]
        if server.is_known:
            self.follow(self.groups.join(server.task))

    def follow(self, views):
        for view in views:
            if view.group == 0:
                for task in view.members:
                    self.network.append(Sent(self.servers[task], "view", (view,)))

    # --- what has to hold -----------------------------------------------------------------------------------

    @property
    def is_lost(self):
        """Whether both copies are gone: a server died that had the only one."""
        view = self.groups.views[0]
        primary = self.servers[view.primary]
        backup = None if view.backup is None or 0 in self.groups.unprotected else self.servers[view.backup]
        return not primary.is_known and (backup is None or not backup.is_known)

    def check(self):
        view = self.groups.views[0]
        lead = self.servers[view.primary]
        if lead.is_known and 0 not in self.groups.lost:
            assert self.acknowledged <= lead.ops, "what was acknowledged is not on the primary"
        if 0 not in self.groups.unprotected and view.backup is not None:
            backup = self.servers[view.backup]
            if backup.is_known:
                assert self.acknowledged <= backup.ops, "what was acknowledged is not on the backup"
        for server in self.servers:
            ops = [op for _, op in server.log if op is not None]
            assert len(ops) == len(set(ops)), "applied twice"
        first, second = (server for server in self.servers)
        if first.rules.epoch == second.rules.epoch and first.is_known and second.is_known:
            short, long = sorted([first.log, second.log], key=len)
            changes = [each for each in long if each[1] is not None][: len(short)]
            assert all(each in changes or each in long for each in short), "the two are not the same"

    def heal(self):
        """All goes well from now on: until there are two copies again, and a client is answered."""
        for _ in range(12):
            for task in range(2):
                if not self.servers[task].is_known:
                    self.notice(task)
                self.join(task)
                self.report(task)
            while self.reports:
                self.hear(0)
            self.settle()
            for server in self.servers:  # what it waits for was lost before: a stream that broke says so
                if server.joining is not None or (server.asked and server.rules.partner is Partner.IN_SYNC):
                    self.loses(server.task)
            for server in self.servers:
                server.asked = [each for each in server.asked if each[0].tenure == server.rules.tenure]

    def settle(self):
        """All arrives, and what may be answered is."""
        for task in range(2):
            self.change(2 * self.num_ops + task)
        while self.network:
            self.deliver(0)
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
    "die",
    "notice",
    *["report"] * 2,
    *["hear"] * 2,
    "join",
]


@examples(400, short=120)
@given(st.lists(st.tuples(st.sampled_from(ACTIONS), st.integers(0, 40)), max_size=80))
def test_what_was_answered_is_there_and_once(actions):
    world = World()
    for name, number in actions:
        getattr(world, name)(number)
        world.check()
    world.network = [sent for sent in world.network if sent.what == "view"]
    if world.is_lost or 0 in world.groups.lost:
        return
    world.heal()
    world.check()
    if 0 not in world.groups.lost:
        assert 0 not in world.groups.unprotected, [server.rules.described() for server in world.servers]
        before = len(world.acknowledged)
        world.settle()
        assert len(world.acknowledged) > before


# The rules one by one, where chance seldom comes.


def rules_of(task, *views):
    rules = GroupRules(task)
    for view in views:
        assert rules.take(view)
    return rules


PAIR = View(0, 1, 0, 1)


def test_a_backup_that_leads_takes_nothing_of_the_one_before():
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


def test_what_was_ordered_before_is_not_answered_after_another_time():
    """Who is the primary, is followed, and is the primary again, has not done what it was asked the first time."""
    rules = rules_of(0, PAIR)
    place = rules.order()
    rules.take(View(0, 3, 1, 0, is_joining=True))
    message(UnavailableError, lambda: rules.may_answer(place), "does not serve")
    assert rules.has_copy(3, Position(2, 5))
    rules.take(View(0, 4, 0, None))
    message(UnavailableError, lambda: rules.may_answer(place), "does not serve")
    assert rules.may_answer(rules.order())


def test_the_backup_counts_once_it_has_said_that_it_has_what_was_answered_without_it():
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


def test_nobody_is_made_what_it_cannot_be():
    joins = rules_of(1, PAIR, View(0, 2, 0, 1, is_joining=True))
    message(InvalidArgumentError, lambda: joins.take(View(0, 3, 1, None)), "does not have all of group 0")
    followed = rules_of(0, PAIR)
    followed.refused(1, Refusal.DEPOSED)
    message(UnavailableError, followed.order, "ps 0 does not serve this group")
    message(InvalidArgumentError, lambda: followed.take(View(0, 3, 0, None)), "does not have all of group 0")


def test_who_leads_is_decided_once_and_a_copy_that_is_behind_never_leads():
    groups = Groups(3)
    assert [view.members for view in groups.views] == [(1, 0), (2, 1), (0, 2)]
    assert [(v.group, v.epoch, v.primary, v.backup) for v in groups.gone(1)] == [
        (0, 2, 0, None),
        (1, 2, 2, None),
    ]
    assert groups.primaries == [0, 2, 2]
    assert groups.unprotected == [0, 1]
    assert [(v.group, v.epoch, v.backup, v.is_joining) for v in groups.join(1)] == [
        (0, 3, 1, True),
        (1, 3, 1, True),
    ]
    assert groups.gone(2) == [View(2, 2, 0, None)]
    assert groups.lost == [1]  # what joins has not all
    groups.back(2)
    assert groups.lost == []
    assert groups.told(2, {"1": {"epoch": 2, "backup": "in sync"}}) == []  # of an epoch before
    assert groups.told(2, {"1": {"epoch": 3, "backup": "in sync"}}) == []
    assert groups.unprotected == [0, 2]
    assert groups.told(0, {"0": {"epoch": 3, "backup": "failed"}}) == [View(0, 4, 0, None)]
    assert groups.to_be_told(0, {"0": {"epoch": 3}}) == [View(0, 4, 0, None), View(2, 2, 0, None)]

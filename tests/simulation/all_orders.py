"""All orders of events of the smallest runs: two or three members, two steps, a fault or two.

Where ``survivors.py`` draws orders, this tries each one: from every state, every event that may come next. Messages of
one connection keep their order. The machines of the epochs are real; a step is one message of each member to each other.
"""

import pickle

from replicax._src.control.arrivals import Arrivals
from replicax._src.control.epoch_member import Await, Begin, EpochMember, Give, Send, Stop
from replicax._src.control.epochs import EpochAgreement


class State:
    """The state of all members, of the controller, and of the messages on their way."""

    def __init__(self, num_members, num_steps, num_kills, num_cuts):
        numbers = range(num_members)
        self.num_steps, self.num_kills, self.num_cuts = num_steps, num_kills, num_cuts
        self.epochs = EpochAgreement(num_members)
        self.members = {number: EpochMember(number) for number in numbers}
        self.arrivals = {number: Arrivals() for number in numbers}
        self.ends = {}  # of those that have ended: "over", "lost", "killed"
        self.reported = set()  # number, epoch
        self.computed = set()  # number, rows
        self.up = {number: [] for number in numbers}  # to the controller
        self.down = {number: [] for number in numbers}
        self.data = {(one, other): [] for one in numbers for other in numbers if one != other}
        self.received = {number: set() for number in numbers}
        for number in numbers:
            self.do(number, self.members[number].enter(0))

    # --- what may come next -------------------------------------------------------------------------

    def events(self):
        """The events that may come next, by their names and arguments."""
        alive = [number for number in self.members if number not in self.ends]
        yield from (("to_controller", number) for number, queue in self.up.items() if queue)
        for number in alive:
            if self.down[number]:
                yield "from_controller", number
            if self.may_commit(number):
                yield "commit", number
            if self.num_kills:
                yield "kill", number
        yield from (("from_peer", *way) for way, queue in self.data.items() if queue and way[1] in alive)
        if self.num_cuts:
            yield from (("cut", one, other) for one in alive for other in alive if one < other)

    def after(self, event):
        """Returns the state after an event."""
        state = pickle.loads(pickle.dumps(self))
        name, *arguments = event
        getattr(state, name)(*arguments)
        return state

    def to_controller(self, number):
        message = self.up[number].pop(0)
        outbox = self.epochs.lose(number, "died") if message is None else self.epochs.receive(number, message)
        for to, each in outbox:
            if each["kind"] == "lost":
                holders = [
                    n for n in self.members if n not in self.ends and self.members[n].version is not None
                ]
                assert not holders or each["reason"] == "start", f"the run is lost, and {holders} live"
            self.down[to].append(each)

    def from_controller(self, number):
        message = self.down[number].pop(0)
        if message["kind"] == "end":
            self.arrivals[number].end(message["epoch"])
        self.do(number, self.members[number].receive(message))

    def from_peer(self, sender, number):
        kind, epoch, version = self.data[sender, number][0]
        member = self.members[number]
        has_ended = self.arrivals[number].has_ended(epoch)
        if epoch != member.epoch and not has_ended:
            return  # it stays until this member is in that epoch
        self.data[sender, number].pop(0)
        if has_ended:
            return
        if kind == "rows":
            self.received[number].add((version, sender))
        elif kind == "closed":
            self.do(number, member.fail())
        elif member.awaited_data is not None:
            assert member.awaited_data.version == version
            self.do(number, member.catch_up())
            self.check_versions()

    def may_commit(self, number):
        member = self.members[number]
        others = set(member.members) - {number}
        return member.may_step and {(member.version + 1, other) for other in others} <= self.received[number]

    def commit(self, number):
        member = self.members[number]
        assert (number, member.epoch) not in self.reported, "a commit after the report"
        member.commit()
        self.check_versions()
        self.compute(number)

    def kill(self, number):
        self.num_kills -= 1
        self.ends[number] = "killed"
        self.up[number].append(None)
        self.close(number, self.members[number].epoch)

    def cut(self, one, other):
        self.num_cuts -= 1
        for way in ((one, other), (other, one)):
            epoch = self.members[way[0]].epoch
            self.data[way] = [each for each in self.data[way] if each[1] != epoch] + [("closed", epoch, 0)]

    # --- actions ------------------------------------------------------------------------------------

    def do(self, number, actions):
        member = self.members[number]
        for action in actions:
            match action:
                case Send(message):
                    if message["kind"] == "report":
                        self.reported.add((number, message["epoch"]))
                        self.close(number, member.epoch)
                    self.up[number].append(message)
                case Begin(epoch):
                    self.received[number] = set()
                    self.arrivals[number].end(epoch - 1)
                case Give(receiver, _, version):
                    self.data[number, receiver].append(("gift", member.epoch, version))
                case Await():
                    pass
                case Stop(reason):
                    self.ends[number] = reason
                    self.up[number].append(None)
                    self.close(number, member.epoch)
        self.compute(number)

    def compute(self, number):
        """Sends the rows of the next step, or finishes."""
        member = self.members[number]
        if not member.may_step:
            return
        if member.version == self.num_steps:
            self.do(number, member.finish())
            return
        rows = ("rows", member.epoch, member.version + 1)
        if (number, *rows) not in self.computed:
            self.computed.add((number, *rows))
            for other in set(member.members) - {number}:
                self.data[number, other].append(rows)

    def close(self, number, epoch):
        for other in self.members:
            if other != number:
                self.data[number, other].append(("closed", epoch, 0))

    # --- checks -------------------------------------------------------------------------------------

    def check_versions(self):
        versions = [self.members[n].version for n in self.epochs.members if n not in self.ends]
        assert max(versions, default=0) - min(versions, default=0) <= 1, versions

    def check_end(self):
        """No event can come any more."""
        waiting = [number for number in self.members if number not in self.ends]
        assert not waiting, f"{waiting} wait without end"
        over = [number for number, end in self.ends.items() if end == "over"]
        assert all(self.members[number].version == self.num_steps for number in over)


def explore(*arguments, most=10**9):
    """Visits every state. Returns their number, and how the runs ended.

    Args:
      arguments: Those of ``State``.
      most: The most states to visit.
    """
    first = State(*arguments)
    known, paths, endings = {pickle.dumps(first)}, [(first, ())], set()
    while paths and len(known) < most:
        state, path = paths.pop()
        events = list(state.events())
        real = [event for event in events if event[0] not in ("kill", "cut")]
        try:
            moved = False
            for event in events:
                after = state.after(event)
                key = pickle.dumps(after)
                moved |= event in real and key != pickle.dumps(state)
                if key not in known:
                    known.add(key)
                    paths.append((after, (*path, event)))
            if not moved:
                state.check_end()
                endings.add(tuple(sorted(state.ends.items())))
        except AssertionError as error:
            raise AssertionError(f"{error}, after {path}") from error
    return len(known), endings

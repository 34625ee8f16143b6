"""Groups that train alone, and log: their logs say which pushes each round had, whatever failed."""

from collections import defaultdict

from ps_simulation.local_groups import LocalGroups
from replicax._ps.local_updates.logged_events import ServedVersion
from replicax._ps.local_updates.replay_file import (
    ReplayKind,
    ReplayOfProcess,
    ReplayRecord,
    instance_number,
)
from replicax._ps.local_updates.replay_plan import ReplayPlan
from replicax._src.vocabulary.errors import UnsupportedError


class RecordedLog:
    """The log of one process, as ``ReplayWriter`` and ``read_replay_file`` make it, without a file."""

    def __init__(self, process):
        self._process = process
        self.records = []
        self._instances = {}
        self._closed = defaultdict(int)  # (fragment, instance): the last version that was noted

    def claimed(self, fragment, instance, number, birth, before):
        self._instances[fragment] = instance_number(instance)
        has = {"before": before.owner, "before_number": before.pushed, "before_version": before.landed + 1}
        self._note(ReplayKind.CLAIMED, fragment, number=number, birth=birth, **has)

    def taken(self, fragment, number, tokens):
        self._note(ReplayKind.TAKEN, fragment, step=self._process.step, number=number, tokens=tokens)

    def landed(self, fragment, number, version, checksum):
        self._note(ReplayKind.LANDED, fragment, number=number, version=version, checksum=checksum)

    def adopted(self, fragment, version, checksum, *, keeps, returns, drops):
        for kind, numbers in ((ReplayKind.KEPT, keeps), (ReplayKind.GIVEN, returns)):
            for number in numbers:
                self._note(kind, fragment, number=number)
        of_adoption = {"step": self._process.step, "version": version, "is_special": int(drops)}
        self._note(ReplayKind.ADOPTED, fragment, checksum=checksum, **of_adoption)

    def history(self, fragment, history):
        key = fragment, self._instances[fragment]
        for version in range(self._closed[key] + 1, len(history) + 1):
            is_flush, rows = history[version - 1]
            of_round = {"version": version, "is_special": int(is_flush), "rows": tuple(rows)}
            self._note(ReplayKind.CLOSED, fragment, **of_round)
        self._closed[key] = len(history)

    def _note(self, kind, fragment, **fields):
        if self._process.is_alive:
            record = ReplayRecord(kind, fragment, instance=self._instances.get(fragment, 0), **fields)
            self.records.append(record)


class LoggedGroups(LocalGroups):
    """The scenario of groups, whose pushes are found from logs at its end. Those without rows change nothing."""

    def __init__(self, seed):
        super().__init__(seed)
        self.logs = {}  # owner: log
        self.pushes = {}  # (fragment, number of the instance, version): the pushes of the round that made it
        self.is_replayable = True

    def log_of(self, process):
        return self.logs.setdefault(process.owner, RecordedLog(process))

    def note_started(self, server):
        super().note_started(server)
        for fragment, model in server.rounds.items():
            for version in range(1, model.version + 1):
                self._note_pushes(server, fragment, version, model)

    def note_closed(self, server, fragment, version, model):
        super().note_closed(server, fragment, version, model)
        self._note_pushes(server, fragment, version + 1, model)

    def _note_pushes(self, server, fragment, version, model):
        key = fragment, instance_number(server.instance), version
        pushes = model.rounds[version - 1]
        self.pushes[key] = sorted((owner, number) for _, owner, number, tokens in pushes if tokens)

    def check(self, world):
        super().check(world)
        parts, owners = [], {}
        header = {
            "num_groups": self.num_groups,
            "every": 1,
            "compression": None,
            "sgd": None,
            "fragments": [],
        }
        for number in range(self.num_groups):
            mine = [owner for owner, process in self.processes.items() if process.number == number]
            for at, owner in enumerate(mine):
                owners[number, at] = owner
                described = {**header, "group": number, "owner": owner, "has_several_processes": False}
                parts.append([ReplayOfProcess(described, self.logs[owner].records)])
        try:
            plan = ReplayPlan(parts)
        except UnsupportedError:
            self.is_replayable = False
            return
        instances = {
            (fragment, restarts): instance
            for fragment, some in plan.instances.items()
            for instance, restarts in some.items()
        }
        for (fragment, served), each in plan.rounds.items():
            found = sorted(
                (owners[push.group, push.process], push.number) for push in each.pushes if push.tokens
            )
            there = self.pushes[fragment, instances[fragment, served.restarts], served.version]
            assert found == there, f"round {served} of fragment {fragment} has other pushes"
        # Of other versions no log says anything: nobody adopted them, or a later one of that server.
        noted = {
            (record.fragment, record.instance, record.version)
            for log in self.logs.values()
            for record in log.records
            if record.kind is ReplayKind.CLOSED
        }
        for (fragment, restarts), origin in plan.origins.items():
            for version in range(1, origin.version + 1):
                made_at = restarts
                while made_at and version <= plan.origins[fragment, made_at].version:
                    made_at -= 1
                key, made = ((fragment, instances[fragment, each], version) for each in (restarts, made_at))
                one, other = self.pushes.get(made), self.pushes.get(key)
                is_equal = one == other or None in (one, other)
                assert is_equal or key not in noted, f"a server has another version {version}"
        for fragment, served in plan.num_adoptions:
            is_there = served.version == 0 or (fragment, served) in plan.rounds
            is_there |= served.restarts and served.version == plan.origins[fragment, served.restarts].version
            assert is_there, f"no log has round {served} of fragment {fragment}"
        assert ServedVersion(0, 0) not in {served for _, served in plan.rounds}

    def outcome(self, world):
        return super().outcome(world) if self.is_replayable else "not replayable"

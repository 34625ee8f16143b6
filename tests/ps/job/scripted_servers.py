"""A job without workers, whose parameter servers answer by script on virtual time."""

import heapq
from itertools import count

from replicax._ps.client.groups import Groups
from replicax._ps.job.actions_out import Ask, Perform
from replicax._ps.job.job_servers import JobServers
from replicax._ps.job.limits import Limits
from replicax._ps.job.procedures import Procedures
from replicax._ps.job.setup import Setup
from replicax._src.vocabulary.errors import InvalidArgumentError, RemoteError, UnavailableError

ME = "me"


class ScriptedServer:
    """One parameter server. ``script[op]`` is called before it carries out a request, with the server.

    Attributes:
      is_down: It refuses connections.
      is_silent: It answers nothing, and requests end with their timeouts.
      delays: The seconds after which an operation is carried out, by name.
      late: The seconds after which the answer to an operation that was carried out arrives, by name.
      refuses: The errors with which it answers operations, by name.
      asked: The requests that it has carried out, without heartbeats.
    """

    def __init__(self, index):
        self.index = index
        self.names = (f"{index}.{n}" for n in count())
        self.instance = next(self.names)
        self.is_down = self.is_silent = False
        self.restored = None
        self.has_session = True
        self.epochs, self.num_updates = {}, 0
        self.ended = None
        self.groups = {}
        self.views = {}
        self.delays, self.late, self.script, self.refuses = {}, {}, {}, {}
        self.asked = []

    def restarts(self, restored=None, groups=None):
        """Becomes another process, with a snapshot or without."""
        self.instance = next(self.names)
        self.restored = restored
        self.groups = dict(groups or {})
        self.views = {}
        self.has_session = restored is not None
        self.is_down = False

    def answer(self, op, header):
        self.script.get(op, lambda server: None)(self)
        if op != "heartbeat":
            self.asked.append((op, header.get("epoch")))
        if op in self.refuses:
            raise self.refuses[op]
        return getattr(self, f"_{op}")(header)

    @property
    def statistics(self):
        return {
            "updates": self.num_updates,
            "groups": {group: dict(part) for group, part in self.groups.items()},
            "snapshot_error": "",
        }

    def _heartbeat(self, header):
        return {"instance": self.instance, "statistics": self.statistics}

    def _status(self, header):
        return {"instance": self.instance, "restored": self.restored, "statistics": self.statistics}

    def _hello(self, header):
        self.has_session = True
        return {"instance": self.instance}

    def _snapshot(self, header):
        # As if all has changed each time: the newest two are kept, and the last that all servers have.
        kept_epochs = {*sorted(self.epochs)[-1:], header["kept_epoch"]}
        self.epochs = {epoch: name for epoch, name in self.epochs.items() if epoch in kept_epochs}
        self.epochs[header["epoch"]] = self.instance
        return {"epoch": header["epoch"]}

    def _restore(self, header):
        if header["epoch"] not in self.epochs:
            raise RemoteError("no such epoch", "SnapshotError", f"ps {self.index}")
        self.ended = header["stop"], header["unfinished"]
        self.instance = next(self.names)
        self.restored = kept()
        return {"instance": self.instance, "restored": self.restored}

    def _group(self, header):
        view = header["view"]
        if not self.has_session:
            raise UnavailableError("It does not know the coordinator.")
        held = self.groups.get(str(view["group"]), {"position": [0, 0], "updates": 0})
        if view["since"] is not None and list(view["since"]) != list(held["position"]):
            raise InvalidArgumentError("It lacks updates.")
        self.views[view["group"]] = view
        is_primary = view["primary"] == self.index
        backup = "none" if view["backup"] is None else "joining" if view["is_joining"] else "in sync"
        self.groups[str(view["group"])] = {
            **held,
            "epoch": view["epoch"],
            "role": "primary" if is_primary else "backup",
            "backup": backup if is_primary else "none",
            "error": "",
        }
        return {}


def kept(**what):
    """What a server says of a snapshot of this session."""
    return {"incarnation": ME, "updates": 3, "keys": ["w"], **what}


def part(position, **what):
    """What a server says of its copy of a group."""
    return {
        "epoch": 0,
        "role": "none",
        "position": list(position),
        "backup": "none",
        "error": "",
        "updates": 9,
        **what,
    }


class ScriptedJob:
    """What the parameter servers' side gets from a job, and the world that answers it."""

    def __init__(
        self,
        num_servers=2,
        intervals_s=(60.0, 30.0),
        *,
        how="continue",
        copies=False,
        last_epoch=0,
        **limits,
    ):
        groups = Groups(num_servers) if copies else None
        self.setup = Setup(
            num_workers=0,
            num_servers=num_servers,
            limits=Limits(**limits),
            incarnation=ME,
            ps_addresses=tuple(f"host{n}:1" for n in range(num_servers)),
            snapshot_intervals_s=tuple(intervals_s),
            groups=groups,
            on_ps_restart=how,
            last_epoch=last_epoch,
        )
        self.procedures, self.now = Procedures(), 0.0
        self.paused, self.broken = set(), {}
        self.num_in_flight, self.num_rounds, self.is_closed = 0, 0, False
        self.has_half_done = False
        self.next_number = self.num_finished = 0
        self.unfinished = []
        self.num_made = 1
        self.num_told_workers, self.lines, self.operations = 0, [], []
        self.missing, self.names, self.operation_s = {}, ["w"], 0.01
        self.ps = [ScriptedServer(n) for n in range(num_servers)]
        if copies:
            for view in groups.views:
                for task in view.members:
                    self.ps[task].answer("group", {"view": view.described()})
        self.sent, self._coming, self._order = [], [], count()
        self.servers = JobServers(self, [ps.instance for ps in self.ps], last_epoch + 1)
        self.servers.start(0.0)

    # --- for the rules -----------------------------------------------------------------------------------

    def pause(self, why):
        self.paused.add(why)

    def resume(self, why):
        self.paused.discard(why)

    def broke(self, error, why=None):
        self.num_in_flight = self.num_rounds = 0
        self.broken[why] = error

    def mended(self, why):
        self.broken.pop(why, None)

    @property
    def is_quiet(self):
        return not self.num_in_flight and not self.num_rounds

    @property
    def is_over(self):
        return self.is_closed or bool(self.broken)

    def log(self, level, text, *arguments, error=None):
        if level > 10:
            self.lines.append(text % arguments)

    def tell_workers_primaries(self):
        self.num_told_workers += 1

    # --- the world ---------------------------------------------------------------------------------------

    @property
    def may_run(self):
        """True if functions are given to workers."""
        return not self.paused and not self.is_over

    @property
    def log_text(self):
        return "\n".join(self.lines)

    @property
    def groups(self):
        return self.setup.groups

    def close(self):
        self.is_closed = True
        self.procedures.stop_all()
        self.servers.close()
        self.sent.clear()

    def run(self, seconds):
        """Lets virtual time pass."""
        self.run_until(lambda: False, seconds)

    def run_until(self, is_so, seconds=30.0):
        """Lets virtual time pass until a condition holds. Returns False if it does not, after so many seconds."""
        end = self.now + seconds
        while True:
            self.procedures.wake(self.now)
            self._send()
            if is_so():
                return True
            times = [end] + [each[0] for each in self._coming[:1]]
            if self.procedures.wake_at is not None:
                times.append(self.procedures.wake_at)
            self.now = max(self.now, min(times))
            if self._coming and self._coming[0][0] <= self.now:
                heapq.heappop(self._coming)[2]()
            elif self.now >= end:
                return False

    def _send(self):
        actions, self.procedures.actions[:] = list(self.procedures.actions), []
        for action in actions:
            self.sent.append(action)
            if isinstance(action, Ask):
                server = self.ps[int(action.task.split()[1])]
                self._at(server.delays.get(action.op, 0.01), lambda a=action, s=server: self._carry_out(a, s))
            else:
                assert isinstance(action, Perform)
                self._at(self.operation_s, lambda a=action: self._perform(a))

    def _at(self, delay_s, do):
        heapq.heappush(self._coming, (self.now + delay_s, next(self._order), do))

    def _carry_out(self, action, server):
        if server.is_silent:
            late = UnavailableError("It does not answer.", action.task, is_silent=True)
            self._at(action.timeout_s, lambda: self.procedures.failed(action.request, late, self.now))
            return
        try:
            if server.is_down:
                raise UnavailableError("It refuses connections.", action.task)
            answer = server.answer(action.op, action.header)
        except Lost:  # it was carried out
            late = UnavailableError("The answer is lost.", action.task)
            self.procedures.failed(action.request, late, self.now)
        except Exception as error:
            self.procedures.failed(action.request, error, self.now)
        else:
            arrives = lambda: self.procedures.answered(action.request, answer, self.now)  # noqa: E731
            self._at(server.late.get(action.op, 0.0), arrives)

    def _perform(self, action):
        self.operations.append((action.operation, action.arguments))
        answers = {"restored": lambda ps, keys: self.missing.get(ps, []), "names_on": lambda ps: self.names}
        answer = answers.get(action.operation, lambda *_: None)(*action.arguments)
        self.procedures.answered(action.request, answer, self.now)


class Lost(Exception):
    """Raised by a script: the answer does not arrive."""

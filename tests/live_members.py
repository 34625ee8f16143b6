"""Tasks that train together, as threads: a task may die, and the others continue. A lock is the controller."""

import contextlib
import shutil
import threading

from replicax._src.checkpoint import agreement
from replicax._src.cluster import turns
from replicax._src.cluster.gathered import GatheredValues
from replicax._src.control.standing import Moment
from replicax._src.values.framework import use_imported

LONGEST_WAIT_S = 60.0


class Died(BaseException):
    """The task has died at this moment."""


class Members:
    """The live tasks of a cluster.

    Args:
      monkeypatch: Makes checkpoints take these tasks for the processes of the cluster.
      live: The numbers of the live tasks.
      count: The number of tasks.
      tolerates_failures: True if they continue after a death.
    """

    def __init__(self, monkeypatch, live, count, *, tolerates_failures=True):
        self.names = tuple(f"worker {number}" for number in range(count))
        self.live, self.tolerates_failures = sorted(live), tolerates_failures
        self.offers = {}  # by key, by number
        self.gathered = {}
        self.changed = threading.Condition()
        self.here = threading.local()
        for module in (agreement, turns):
            monkeypatch.setattr(module, "joined_peers", lambda: getattr(self.here, "peers", None))
        monkeypatch.setattr(agreement, "_checked", {})
        use_imported()  # once, because the tasks are threads of one process
        rmtree = shutil.rmtree
        monkeypatch.setattr(
            shutil, "rmtree", lambda *args, **how: None if self.is_dead() else rmtree(*args, **how)
        )

    def run(self, function):
        """Calls ``function(member)`` in each live task. Returns the results by number: ``Died`` for a task that died,
        and the error for one that raised."""
        results = {}

        def call(number):
            self.here.peers = member = Member(self, number)
            try:
                results[number] = function(member)
            except Died:
                results[number] = Died
                self.lose(number)
            except Exception as error:
                results[number] = error
                self.lose(number)

        threads = [threading.Thread(target=call, args=(number,)) for number in self.live]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=LONGEST_WAIT_S)
            assert not thread.is_alive()
        return results

    def is_dead(self):
        """True in a task that has died. It cleans nothing up."""
        peers = getattr(self.here, "peers", None)
        return peers is not None and peers.is_dead

    def lose(self, number):
        with self.changed:
            self.live.remove(number)
            for offers in self.offers.values():
                offers.pop(number, None)
            for key in list(self.offers):
                self.complete(key)

    def complete(self, key):
        offers = self.offers[key]
        if key not in self.gathered and self.live and set(self.live) <= offers.keys():
            self.gathered[key] = {number: offers[number] for number in self.live}
        self.changed.notify_all()

    def gather(self, number, key, value):
        with self.changed:
            self.offers.setdefault(key, {})[number] = value
            self.complete(key)
            assert self.changed.wait_for(lambda: key in self.gathered, LONGEST_WAIT_S), key
            of_all = self.gathered[key]
        return GatheredValues(list(of_all.values()), list(of_all), self.names, number)


class Member:
    """One task, in place of ``Peers``.

    Attributes:
      dies_at: The task dies when it comes to an all-gather whose key contains this text.
      dies_after: The task dies when such an all-gather has ended.
      keys: The keys of its all-gathers.
    """

    dies_at = dies_after = admission = last_entry = None
    is_dead = is_solo = False

    def __init__(self, world, number):
        self.world, self.number, self.names = world, number, world.names
        self.tolerates_failures = world.tolerates_failures
        self.keys = []
        self.counts = {}

    def __len__(self):
        return len(self.names)

    @property
    def members(self):
        return tuple(self.world.live)

    @property
    def is_leader(self):
        return self.number == self.members[0]

    def serve(self):
        pass

    def die(self):
        self.is_dead = True
        raise Died

    def gather(self, topic, value, what="", is_cancelled=None):
        count = self.counts[topic] = self.counts.get(topic, -1) + 1
        return self.gather_once(f"{topic} {count}", value, what)

    def moment(self):
        return Moment()

    def gather_once(self, key, value, what="", since=None):
        self.keys.append(key)
        if self.dies_at is not None and self.dies_at in key:
            self.die()
        found = self.world.gather(self.number, key, value)
        if self.dies_after is not None and self.dies_after in key:
            self.die()
        return found


@contextlib.contextmanager
def dying_in(monkeypatch, module, name, number):
    """Makes the task with this number die in place of a call of a function of a module."""
    original = getattr(module, name)

    def function(*args, **kwargs):
        peers = agreement.joined_peers()
        if peers is not None and peers.number == number:
            peers.die()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(module, name, function)
        yield

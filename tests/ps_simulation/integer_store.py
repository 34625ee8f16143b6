"""``IntegerStore``: what a simulated parameter server holds: counters, and what the real store knows about them.

A counter is a tuple of the numbers of the functions that were added to it, in their order, so that a check can say which
one is missing or came twice. Its value is its length. A function adds to a counter and to its ``twin``, which is another
variable: someone who reads two that differ has seen half an update.
"""

from replicax._ps.store.window import Windows
from replicax._src.vocabulary.errors import (
    InvalidArgumentError,
    MessageError,
    UnavailableError,
    UnknownProgramError,
)


def twin(key):
    """Returns the key of the counter that changes together with a counter."""
    return f"{key}, again"


def both(key):
    return [key, twin(key)]


def value_in(counters, key):
    """Returns the value of a counter and of its twin, which must be equal."""
    value, other = counters[key], counters[twin(key)]
    assert value == other, f"half an update of {key}: {value} and {other}"
    return value


class IntegerStore:
    """Counters, programs, windows and held gradients.

    Args:
      instance: A name that no other store has.
      owner: The session that it belongs to.
    """

    def __init__(self, instance, owner=None):
        self.instance, self.owner = instance, owner
        self.ended = None  # the coordinator, and what it says of the closures that have ended
        self.clear()

    def clear(self):
        """Drops everything."""
        self.counters = {}
        self.programs = set()
        self.windows = Windows()
        self.gradients = {}  # round: closure: its keys
        self.num_updates = self.num_changes = self.num_created = 0

    def hello(self, incarnation):
        """Gives the store to this coordinator. Data of another one is dropped."""
        if incarnation != self.owner:
            self.owner = incarnation
            self.clear()

    def leave(self, instance):
        """Drops everything, and belongs to no coordinator."""
        self.owner, self.instance = None, instance
        self.clear()

    def answer(self, request):
        """Executes a request; see ``Store.answer``."""
        if request["incarnation"] != self.owner:
            raise UnavailableError("The store belongs to another coordinator, or to none.")
        operation = getattr(self, f"_{request['op']}", None)
        if operation is None:
            raise MessageError(f"A parameter server has no operation {request['op']!r}.")
        return operation(request)

    # --- operations ---------------------------------------------------------------------------------

    def _create(self, request):
        if self._has_done(request):
            return {"duplicate": True}
        for key in request["keys"]:
            if key not in self.counters:
                self.counters[key] = ()
                self.num_created += 1
                self.num_changes += 1
        self._did(request)
        return {}

    def _find(self, request):
        return {"found": [key for key in request["keys"] if key in self.counters]}

    def _program(self, request):
        self.programs.add(request["digest"])
        return {}

    def _step(self, request):
        closure, gradients = request["closure"], request.get("gradients")
        for digest in (request.get("program"), gradients and gradients["program"]):
            if digest is not None and digest not in self.programs:
                raise UnknownProgramError(f"The parameter server has no program {digest}.", digest)
        for key in request["pull"]:
            self._counter(key)
        if closure is not None:
            self.windows.window_of(closure[0]).raise_low(request["low"])
        if gradients is not None:
            self._hold(closure, gradients)
        is_duplicate = False
        if request.get("program") is not None:
            is_duplicate = self._update(closure, request["keys"])
        if request.get("only_apply"):
            return {"duplicate": is_duplicate}
        values = {key: self._counter(key) for key in request["pull"]}
        return {"duplicate": is_duplicate, "instance": self.instance, "values": values}

    def _hold(self, closure, gradients):
        number = gradients["round"]
        if number not in self.windows.window_of(f"{closure[0]} rounds"):
            self.gradients.setdefault(number, {}).setdefault(closure[1], gradients["keys"])

    def _update(self, closure, keys):
        window = self.windows.window_of(closure[0])
        if closure[1] in window:
            return True
        for key in keys:
            self._counter(key)
        self._add([closure[1]], keys)
        window.add(closure[1])
        return False

    def _apply(self, request):
        incarnation, number = request["round"]
        for other in [other for other in self.gradients if other < request["low"]]:
            del self.gradients[other]
        window = self.windows.window_of(f"{incarnation} rounds")
        window.raise_low(request["low"])
        if number in window:
            return {"duplicate": True}
        held = self.gradients.pop(number, {})
        taken = [closure for closure in request["closures"] if closure in held]
        if taken:
            self._add(taken, held[taken[0]])
        window.add(number)
        return {"duplicate": False}

    # --- contents -----------------------------------------------------------------------------------

    def _counter(self, key):
        if key not in self.counters:
            raise InvalidArgumentError(f'There is no shard "{key}" on this parameter server.')
        return self.counters[key]

    def _add(self, numbers, keys):
        for key in keys:
            self.counters[key] = (*self.counters[key], *numbers)
        self.num_changes += 1
        self.num_updates += 1

    def _has_done(self, request):
        client, number = request["number"]
        window = self.windows.window_of(client)
        window.raise_low(request["low"])
        return number in window

    def _did(self, request):
        client, number = request["number"]
        self.windows.window_of(client).add(number)

    # --- for a snapshot, or another store -----------------------------------------------------------

    def described(self):
        """Returns everything but the counters."""
        return {
            "incarnation": self.owner,
            "updates": self.num_updates,
            "windows": self.windows.described(),
            "programs": sorted(self.programs),
            "num_held_gradients": sum(map(len, self.gradients.values())),
        }

    def take(self, described, counters, instance):
        """Replaces everything by what was ``described``, with these counters and no program, as another instance."""
        self.instance, self.owner = instance, described["incarnation"]
        self.clear()
        self.counters = dict(counters)
        self.windows = Windows.of(described["windows"])
        if self.ended is not None and self.ended[0] == described["incarnation"]:
            self.windows.window_of(self.ended[0]).end(*self.ended[1:])
        self.num_updates = described["updates"]

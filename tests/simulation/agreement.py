"""What one agreement costs: a member of many dies, and the others form the next epoch. ``python tests/simulation/agreement.py``
prints the table of docs/explanation/simulation.md.

The network takes 1 ms for every message. The controller's processor time is real, and its messages become bytes and are
read as they are in the controller's process; computing takes no virtual time.
"""

import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))

from replicax._src.cluster.control_messages import checked
from replicax._src.control.controller import Controller
from replicax._src.control.epoch_member import Begin, EpochMember, Send
from simulation.world import Process, World

LATENCY_S = 0.001


class Center(Process):
    """Owns the controller, and counts."""

    def __init__(self, world, num_members):
        super().__init__(world, "controller")
        self.controller = Controller([f"worker {number}" for number in range(num_members)])
        self.members = {}
        self.num_messages = self.num_bytes = 0
        self.cpu_s = 0.0

    def receive(self, connection, text):
        started = time.process_time()
        message = checked(text)
        self.num_messages += 1
        if message["kind"] == "hello":
            number = message["member"]
            self.members[number] = connection
            assert self.controller.join(number, self.world.now, min_workers=1) is None
        else:
            self.send(self.controller.receive(int(connection.label), message, self.world.now))
        self.cpu_s += time.process_time() - started

    def closed(self, connection):
        started = time.process_time()
        del self.members[int(connection.label)]
        self.send(self.controller.disconnect(int(connection.label), self.world.now))
        self.cpu_s += time.process_time() - started

    def send(self, outbox):
        texts = {}
        for number, message in outbox:
            text = texts.get(id(message)) or texts.setdefault(id(message), json.dumps(message).encode())
            self.members[number].send(text)
            self.num_messages += 1
            self.num_bytes += len(text)


class Member(Process):
    """A member without a program: it reports, and enters the next epoch."""

    def __init__(self, world, number):
        super().__init__(world, f"worker {number}")
        self.number, self.member = number, EpochMember(number)
        self.begun_at = None

    def start(self):
        self.control = self.connect("controller", str(self.number))
        self.tell({"kind": "hello", "member": self.number})
        self.do(self.member.enter(0))

    def receive(self, connection, text):
        self.do(self.member.receive(json.loads(text)))

    def tell(self, message):
        self.control.send(json.dumps(message).encode())

    def do(self, actions):
        for action in actions:
            if isinstance(action, Send):
                self.tell(
                    {**action.message, "address": f"10.0.{self.number // 256}.{self.number % 256}:34567"}
                )
            elif isinstance(action, Begin):
                self.begun_at = self.world.now


@dataclass
class Cost:
    """The cost of one agreement."""

    num_members: int
    num_messages: int
    num_bytes: int
    virtual_s: float
    cpu_s: float


def cost(num_members):
    """Returns the cost of the agreement after a death."""
    world = World(0, delay_s=LATENCY_S, slow=0.0, is_even=True)
    center = Center(world, num_members)
    world.start(center)
    members = [Member(world, number) for number in range(num_members)]
    for member in members:
        world.start(member)
    world.run(1.0, lambda: False)
    assert all(member.member.may_step for member in members)
    center.num_messages, center.num_bytes, center.cpu_s = 0, 0, 0.0
    started = world.now
    members[num_members // 2].end(-9)
    world.run(started + 2.0, lambda: False)
    live = [member for member in members if member.is_alive]
    assert all(member.member.epoch == 2 and member.member.may_step for member in live)
    virtual_s = max(member.begun_at for member in live) - started
    return Cost(num_members, center.num_messages, center.num_bytes, virtual_s, center.cpu_s)


if __name__ == "__main__":
    print("| members | messages | bytes sent | virtual time | processor time of the controller |")
    print("|--:|--:|--:|--:|--:|")
    for number in (10, 100, 1000):
        found = min((cost(number) for _ in range(3)), key=lambda each: each.cpu_s)
        print(
            f"| {number:,} | {found.num_messages:,} | {found.num_bytes / 1e3:,.0f} kB | {found.virtual_s * 1e3:.0f} ms | "
            f"{found.cpu_s * 1e3:,.1f} ms |"
        )

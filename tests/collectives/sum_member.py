"""A process that adds arrays with others, as the messages on its standard input say. It answers with lines of JSON."""

import hashlib
import json
import queue
import sys
import threading

import numpy as np

from replicax._src.collectives.host_sums.errors import EpochEnded
from replicax._src.collectives.host_sums.members import Member
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.wire.security import Security

LIMIT_S = 120.0


def array_of(step, replica, length):
    return np.random.default_rng([step, replica]).random(length, np.float32)


def digest(array):
    return hashlib.sha256(array.tobytes()).hexdigest()


def tell(**message):
    print(json.dumps(message), flush=True)


def main(shares_memory, num_steps, length, pause_step):
    rendezvous = Rendezvous("127.0.0.1", Security(b"secret"), shares_memory=shares_memory)
    orders, may_go_on = queue.Queue(), threading.Event()

    def read():
        for line in sys.stdin:
            message = json.loads(line)
            if message["kind"] == "end":  # on this thread, while the other one waits
                rendezvous.end(message["epoch"], message["reason"])
            elif message["kind"] == "go on":
                may_go_on.set()
            else:
                orders.put(message)
        orders.put(None)

    threading.Thread(target=read, daemon=True).start()
    tell(kind="address", address=rendezvous.address)
    while (order := orders.get()) is not None:
        epoch, number, step = order["epoch"], order["number"], order["step"]
        members = [Member(n, f"worker {n}", address, tuple(held)) for n, address, held in order["members"]]
        own = next(member for member in members if member.number == number)
        try:
            world = rendezvous.meet(epoch, members, number, LIMIT_S)
            while step < num_steps:
                if step == pause_step:
                    may_go_on.wait(LIMIT_S)
                arrays = [array_of(step, replica, length) for replica in own.replicas]
                tell(kind="step", step=step)
                tell(kind="sum", step=step, digest=digest(world.all_reduce("sum", arrays, step=step)))
                step += 1
            tell(kind="done", epoch=epoch, step=step)
        except EpochEnded as ended:
            tell(kind="ended", epoch=epoch, step=step, lost=ended.lost, reason=ended.reason)
    rendezvous.close()


if __name__ == "__main__":
    main(sys.argv[1] == "shared memory", *map(int, sys.argv[2:]))

"""A process of a training of NumPy arrays that goes on after deaths. It says in lines of JSON where it is."""

import hashlib
import json
import logging
import os
import sys
import time

import numpy as np

from number_steps import Training
from replicax._src.cluster.control_messages import security_of
from replicax._src.cluster.membership import Membership
from replicax._src.cluster.spec import ClusterSpec
from replicax._src.cluster.start import join_cluster
from replicax._src.collectives.host_sums.rendezvous import Rendezvous
from replicax._src.fault_tolerance.survivors import Survivors

LIMIT_S = 60.0


def tell(**message):
    os.write(1, json.dumps(message).encode() + b"\n")  # in one piece, also if this process is killed


def admit_if_asked(survivors, training, *, waits):
    """A boundary. With ``waits`` the chief waits there until a replacement asks."""
    deadline = time.monotonic() + LIMIT_S
    while waits and survivors._member.is_chief and not survivors.is_asked:
        assert time.monotonic() < deadline, "no replacement has come"
        time.sleep(0.005)
    if survivors.is_asked:
        survivors.admit(lambda: ({"count": training.count}, [training.weights]))
        tell(admits=training.count)


def main(addresses, number, num_steps, length, *waits):
    logging.basicConfig(level=logging.INFO)
    peers = join_cluster(
        Membership.of(ClusterSpec({"worker": addresses}), "worker", number), LIMIT_S, min_workers=1
    )
    survivors = Survivors(peers, Rendezvous("127.0.0.1", security_of()), len(addresses), LIMIT_S)
    survivors.start()
    peers.at_end, peers.admission = survivors.finish, survivors
    training = Training(length)
    if survivors.is_newcomer:
        content, (weights,) = survivors.enter()
        training.weights, training.count = np.array(weights), content["count"]
        tell(enters=training.count)
    for step in range(training.count, num_steps):
        tell(begins=step)
        survivors.run(training.step(), "to train")
        tell(ends=step, at=time.monotonic(), epoch=survivors.describe()["epoch"])
        if step % 5 == 0:
            peers.gather("pause", step, "to compare")
        admit_if_asked(survivors, training, waits=step in waits)
    digest = hashlib.sha256(training.weights.tobytes()).hexdigest()
    tell(digest=digest, **survivors.describe())


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), *map(int, sys.argv[2:]))

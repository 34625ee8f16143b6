"""The requests of a coordinator called ``ME`` to a store of a parameter server, in this process."""

import numpy as np

from replicax._ps.transport.messages import Message

ME = "me"


def ask(store, op, arrays=(), **header):
    return store.answer(Message({"op": op, "incarnation": ME, **header}, list(arrays)))


def send(store, program):
    blob = np.frombuffer(program.blob, np.uint8)
    ask(store, "program", [blob], digest=program.digest, described=program.described())


def create(store, **values):
    described = [
        {"key": key, "shape": list(value.shape), "dtype": value.dtype.name, "initial": "array"}
        for key, value in values.items()
    ]
    ask(store, "create", values.values(), shards=described)

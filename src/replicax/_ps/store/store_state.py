"""Sends the contents of a store to another server as messages, and makes a store of them there."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from replicax._ps.programs.programs import UpdateProgram
from replicax._ps.store.store import Store
from replicax._ps.store.store_contents import StoreState
from replicax._ps.transport.messages import Message


def state_messages(state: StoreState) -> Iterator[tuple[dict[str, Any], Sequence[np.ndarray]]]:
    """Yields headers and arrays, in order.

    Each shard is released when the next one is requested. Until then an update of it needs new memory.
    """
    yield {"part": "state", "content": state.content}, ()
    while state.shards:
        key, number, value = state.shards.popleft()
        yield {"part": "shard", "key": key, "number": number}, [value]
    yield from program_messages(state.programs)
    for number, closure, digest, arrays in state.gradients:
        yield {"part": "gradients", "round": number, "closure": closure, "program": digest}, arrays
    yield {"part": "end"}, ()


def program_messages(
    programs: Iterable[UpdateProgram],
) -> Iterator[tuple[dict[str, Any], Sequence[np.ndarray]]]:
    """Yields headers and arrays of programs."""
    for program in programs:
        blob = np.frombuffer(program.blob, np.uint8)
        yield {"part": "program", "digest": program.digest, "described": program.described()}, [blob]


def take_part(store: Store, header: Mapping[str, Any], arrays: Sequence[np.ndarray]) -> bool:
    """Adds one of ``state_messages`` to a new store. Returns True for the last one."""
    match header["part"]:
        case "state":
            store.begin_with(header["content"])
        case "shard":
            store.put(header["key"], header["number"], arrays[0])
        case "program":
            fields = {name: header[name] for name in ("incarnation", "digest", "described")}
            store.answer(Message({"op": "program", **fields}, arrays))
        case "gradients":
            store.hold(header["round"], header["closure"], header["program"], arrays)
        case _:
            return True
    return False

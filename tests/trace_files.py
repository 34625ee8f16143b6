"""Reads the traces of JAX's profiler: events, and the names that the operations of compiled programs have."""

import collections
import pathlib

from google.protobuf import empty_pb2, unknown_fields
from jax.profiler import ProfileData


def files_in(logdir):
    return sorted(pathlib.Path(logdir).rglob("*.xplane.pb"))


def events_in(path):
    """``(name, stats)`` of all events."""
    return [
        (event.name, dict(event.stats))
        for plane in ProfileData.from_file(str(path)).planes
        for line in plane.lines
        for event in line.events
    ]


def names_of_operations(path):
    """``{operation: its full name}`` of all compiled programs in the file, where JAX's reader shows only the former.

    The path through the messages: planes, event_metadata, value, stats, the HloProto of a program, its module, computations,
    instructions.
    """
    messages = [path.read_bytes()]
    for number in (1, 4, 2, 5, 6, 1, 3, 2):
        messages = [inner for message in messages for inner in fields(message)[number]]
    names = {}
    for instruction in messages:
        found = fields(instruction)
        full = [name for metadata in found[7] for name in fields(metadata)[2]]
        names[found[1][0].decode()] = full[0].decode() if full else ""
    return names


def fields(message):
    """The fields of a message that are strings, bytes or messages, by number; nothing of what is no message."""
    found = collections.defaultdict(list)
    try:
        parsed = empty_pb2.Empty.FromString(message)
    except Exception:
        return found
    for field in unknown_fields.UnknownFieldSet(parsed):
        if field.wire_type == 2:
            found[field.field_number].append(field.data)
    return found

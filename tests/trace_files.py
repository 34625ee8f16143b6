"""Reads the traces of JAX's profiler: events, and the names of operations of compiled programs."""

import collections
import pathlib
import re

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
    """``{(program_id, operation): its full name}`` of all compiled programs in the file.

    JAX's reader shows neither. Programs of one process have operations with the same short names, so each has its own
    dict. The path through the messages: planes, event_metadata, value (whose name ends with the id of the program in
    brackets), stats, the HloProto of a program, its module, computations, instructions.
    """
    names = {}
    for metadata in inner_messages([path.read_bytes()], (1, 4, 2)):
        name = fields(metadata)[2]
        identity = re.search(rb"\((\d+)\)$", name[0]) if name else None
        if identity is None:
            continue
        for instruction in inner_messages([metadata], (5, 6, 1, 3, 2)):
            found = fields(instruction)
            full = [name for metadata in found[7] for name in fields(metadata)[2]]
            names[int(identity[1]), found[1][0].decode()] = full[0].decode() if full else ""
    return names


def inner_messages(messages, numbers):
    """The values found from ``messages`` along the fields with these ``numbers``."""
    for number in numbers:
        messages = [inner for message in messages for inner in fields(message)[number]]
    return messages


def fields(message):
    """The fields of a message that are strings, bytes or messages, by number; nothing if it is not a message."""
    found = collections.defaultdict(list)
    try:
        parsed = empty_pb2.Empty.FromString(message)
    except Exception:
        return found
    for field in unknown_fields.UnknownFieldSet(parsed):
        if field.wire_type == 2:
            found[field.field_number].append(field.data)
    return found

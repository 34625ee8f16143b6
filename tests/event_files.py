"""Reads event files back, by the format: records with checksums, each an Event of tensorboardX's protocol buffers."""

import pathlib
import struct

import numpy as np
from tensorboardX.crc32c import crc32c
from tensorboardX.proto import event_pb2

DTYPES = {1: np.float32, 2: np.float64}


def masked(data):
    crc = crc32c(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def files_in(logdir):
    return sorted(pathlib.Path(logdir).rglob("events.out.tfevents.*"))


def events_of(path):
    content, at = path.read_bytes(), 0
    while at < len(content):
        (size, crc) = struct.unpack_from("<QI", content, at)
        assert crc == masked(content[at : at + 8])
        data = content[at + 12 : at + 12 + size]
        assert struct.unpack_from("<I", content, at + 12 + size)[0] == masked(data)
        yield event_pb2.Event.FromString(data)
        at += 16 + size


def summaries_in(logdir):
    """``(plugin, name, step, value)`` of all files, in their order."""
    found = []
    for path in files_in(logdir):
        for event in events_of(path):
            for value in event.summary.value:
                found.append(
                    (value.metadata.plugin_data.plugin_name, value.tag, event.step, decoded(value.tensor))
                )
    return found


def decoded(tensor):
    shape = [dim.size for dim in tensor.tensor_shape.dim]
    if tensor.string_val:
        return list(tensor.string_val)
    if tensor.tensor_content:
        return np.frombuffer(tensor.tensor_content, DTYPES[tensor.dtype]).reshape(shape)
    return tensor.float_val[0]


def scalars_in(logdir):
    """``{name: {step: value}}``."""
    found = {}
    for plugin, name, step, value in summaries_in(logdir):
        if plugin == "scalars":
            found.setdefault(name, {})[step] = value
    return found

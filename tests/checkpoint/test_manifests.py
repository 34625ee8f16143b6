"""Manifests with a right checksum and wrong contents: only typed errors come out, whatever they say."""

import copy
import json
import math
import shutil
import zlib
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import replicax as rx
from checks import message
from replicax._src.checkpoint import array_chunks
from replicax.checkpoint import CheckpointError, CorruptCheckpointError

OF_FORMAT_4 = Path(__file__).parent / "of_format_4" / "ckpt-1"
HUGE = (2**31, 2**40, 2**62, 2**63, 10**30)


class Counted:
    """An object with a state."""

    count = 0

    def get_state(self):
        return {"count": self.count}

    def set_state(self, state):
        self.count = state["count"]


def tracked():
    with rx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        own = rx.Variable(0.0, synchronization="on_read", aggregation="sum", trainable=False)
    return rx.Checkpoint(
        w=rx.Variable(np.zeros(1000, np.float32)),
        small=rx.Variable(np.zeros(4, np.int32)),
        own=own,
        best=0.5,
        host_random=rx.checkpoint.HostRandomState(),
    )


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """A checkpoint of this version, and one of an earlier version."""
    directory = tmp_path_factory.mktemp("manifests")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(array_chunks, "CHUNK_BYTES", 512)
        patch.setattr(array_chunks, "FILE_BYTES", 2048)
        new = tracked().write(directory / "new-1")
    return [Path(new), Path(shutil.copytree(OF_FORMAT_4, directory / "old-1"))]


def contents_of(path):
    return json.loads((path / "manifest.json").read_text())["contents"]


def write_contents(path, contents):
    text = json.dumps(contents, sort_keys=True)
    manifest = f'{{"crc32": {zlib.crc32(text.encode())}, "contents":\n{text}}}\n'
    (path / "manifest.json").write_text(manifest)


def changed(checkpoint, directory, change):
    """A copy of a checkpoint whose manifest is changed, with a right checksum."""
    copied = Path(shutil.copytree(checkpoint, directory / checkpoint.name))
    contents = contents_of(checkpoint)
    contents["time_s"] *= 2  # the latest
    change(contents)
    write_contents(copied, contents)
    return copied


def places_in(value, path=()):
    yield path
    if isinstance(value, (dict, list)):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places_in(child, (*path, key))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.sampled_from((-1, 0, 1, 2, *HUGE, 1.5, math.nan, math.inf, 1e308))
    | st.sampled_from(("", "w", "../../w", "/etc", "a\0b", "\ud800", "float32", "object", "SUM", "x" * 300)),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("", "a", "bytes")), inner, max_size=2)
    ),
    max_leaves=4,
)


@hypothesis.settings(
    max_examples=100, deadline=None, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
@hypothesis.given(data=st.data())
def test_wrong_manifest_gives_typed_errors_only(data, checkpoints, tmp_path_factory):
    checkpoint = data.draw(st.sampled_from(checkpoints))
    contents = contents_of(checkpoint)
    for _ in range(data.draw(st.integers(1, 3))):
        *above, last = data.draw(st.sampled_from([place for place in places_in(contents) if len(place) > 1]))
        inner = contents
        for key in above:
            inner = inner[key]
        match data.draw(st.sampled_from(("replace", "remove", "repeat", "add"))):
            case "replace":
                inner[last] = data.draw(JSON)
            case "remove":
                del inner[last]
            case "repeat":
                if isinstance(inner, list):
                    inner.append(copy.deepcopy(inner[last]))
                else:
                    inner[data.draw(st.sampled_from(("w", "small", "../w", "arrays/w")))] = inner[last]
            case "add" if isinstance(inner, dict):
                inner[data.draw(st.sampled_from(("", "extra", "../w")))] = data.draw(JSON)
    copied = tmp_path_factory.mktemp("changed") / "ckpt-1"
    shutil.copytree(checkpoint, copied)
    write_contents(copied, contents)
    program, key = tracked(), data.draw(st.sampled_from(("w", "small", "own")))
    for read in (
        lambda: rx.checkpoint.list_variables(copied),
        lambda: rx.checkpoint.load_variable(copied, key),
        lambda: program.restore(copied),
        lambda: rx.CheckpointManager(tracked(), copied.parent).restore_or_initialize(),
    ):
        try:
            read()
        except CheckpointError:
            continue
    shutil.rmtree(copied.parent)


def set_in(*path):
    *above, last, value = path

    def change(contents):
        inner = contents
        for key in above:
            inner = inner[key]
        inner[last] = value

    return change


WRONG = {
    "size of another type": (set_in("arrays", "w", "value", "shape", ["1000"]), "shape[0]"),
    "huge shape": (set_in("arrays", "w", "value", "shape", [2**62]), "shape"),
    "huge file": (set_in("arrays", "small", "value", "file", [2**50]), "small"),
    "negative size": (set_in("arrays", "w", "value", "shape", [-1]), "shape[0]"),
    "unknown dtype": (set_in("arrays", "w", "value", "dtype", "float31"), "float31"),
    "child that does not exist": (set_in("objects", 0, "children", "w", 99), "children['w']"),
    "no objects": (set_in("objects", []), "objects"),
    "key of nothing": (set_in("objects", 1, "key", "else"), "else"),
    "unknown field": (set_in("more", 1), "'more'"),
    "time that is no number": (set_in("time_s", "now"), "time_s"),
    "writer that does not exist": (set_in("arrays", "w", "value", "writers", [3]), "writers"),
    "way to combine": (set_in("arrays", "own", "combine", "ALL"), "combine"),
    "state that is not bytes": (set_in("states", "best", [{"bytes": "?"}]), "base64"),
}


@pytest.mark.parametrize("number", [0, 1], ids=["this version", "an earlier version"])
@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_in_a_manifest_is_named_and_the_previous_checkpoint_is_used(
    wrong, number, checkpoints, tmp_path, caplog
):
    change, says = WRONG[wrong]
    program = tracked()
    manager = rx.CheckpointManager(program, tmp_path, asynchronous=False)
    before = manager.save(0)
    path = changed(checkpoints[number], tmp_path, change)
    shutil.move(path, tmp_path / "ckpt-1")
    message(CorruptCheckpointError, lambda: program.restore(tmp_path / "ckpt-1"), says)
    assert rx.CheckpointManager(tracked(), tmp_path).restore_or_initialize() == before
    assert says in caplog.text


@pytest.mark.parametrize("number", [0, 1], ids=["this version", "an earlier version"])
@pytest.mark.parametrize(("name", "size"), [("shape", 500 * 2**40), ("file", 125 * 2**40), ("chunk", 2**40)])
def test_more_than_the_files_have_is_not_allocated(name, size, number, checkpoints, tmp_path):
    """A process that believes the manifest is aborted, because it has no memory."""

    def change(contents):
        array = contents["arrays"]["w"]["value"]
        array[name] = [size]
        if name == "chunk":
            array["file"] = array["shape"] = [size]

    path = changed(checkpoints[number], tmp_path, change)
    others = {key: getattr(tracked(), key) for key in ("small", "own")}
    for read in (
        lambda: rx.checkpoint.load_variable(path, "w"),
        lambda: rx.checkpoint.export(path, tmp_path / "model.safetensors"),
        lambda: rx.Checkpoint(**others).restore(path),
    ):
        message(CorruptCheckpointError, read, "arrays/w")


def test_key_cannot_leave_the_checkpoint(checkpoints, tmp_path):
    def change(contents):
        contents["arrays"]["../../../w"] = contents["arrays"].pop("w")

    path = changed(checkpoints[0], tmp_path, change)
    message(CorruptCheckpointError, lambda: rx.checkpoint.list_variables(path), "../../../w")


def test_state_that_is_nested_too_deeply_is_refused_when_it_is_saved(tmp_path):
    state = 0
    for _ in range(150):
        state = [state]
    counted = Counted()
    counted.count = state
    with pytest.raises(rx.checkpoint.UntrackableError, match="nested more deeply"):
        rx.Checkpoint(counted=counted).save(tmp_path / "ckpt")

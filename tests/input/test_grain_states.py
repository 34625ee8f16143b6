import json

import grain
import pytest

from replicax._src.input.elements import NotResumableError
from replicax._src.input.opening import open_elements


def state_after(dataset, num_taken):
    one_pass = open_elements(dataset).iterate()
    for _ in range(num_taken):
        next(one_pass)
    return json.loads(json.dumps(one_pass.get_state()))


def rows_after(dataset, state):
    one_pass = open_elements(dataset).iterate()
    one_pass.set_state(state)
    return [element.tolist() for element in one_pass]


def shuffled(num_rows=12, seed=3, batch_size=4):
    return grain.MapDataset.range(num_rows).shuffle(seed=seed).map(lambda row: row + 1).batch(batch_size)


def stream(num_rows=12, batch_size=4, num_threads=16):
    options = grain.ReadOptions(num_threads=num_threads)
    return (
        grain.MapDataset.range(num_rows)
        .to_iter_dataset(options)
        .filter(lambda row: row % 2 == 0)
        .batch(batch_size)
    )


@pytest.mark.parametrize("make", [shuffled, stream])
@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_a_position_is_resumed_in_a_dataset_made_alike(make, num_taken):
    everything = [element.tolist() for element in open_elements(make()).iterate()]
    assert rows_after(make(), state_after(make(), num_taken)) == everything[num_taken:]


@pytest.mark.parametrize(
    ("other", "differs"),
    [
        (grain.MapDataset.range(1000).batch(4), "length"),
        (shuffled(batch_size=3), "length"),
        (shuffled(num_rows=11), "transformations"),
        (shuffled(seed=4), "transformations"),
        (grain.MapDataset.range(12).batch(4), "transformations"),
        (shuffled().repeat(), "length"),
        (shuffled().to_iter_dataset(), "kind"),
        (stream(), "kind"),
    ],
)
def test_state_of_another_dataset_raises(other, differs):
    state = state_after(shuffled(), 2)
    with pytest.raises(NotResumableError, match=f"its {differs} is"):
        rows_after(other, state)


@pytest.mark.parametrize("other", [stream(13), stream(batch_size=5), stream().map(lambda rows: rows)])
def test_state_of_another_stream_raises(other):
    with pytest.raises(NotResumableError, match="its transformations is"):
        rows_after(other, state_after(stream(), 1))


def test_functions_and_threads_may_change():
    state = state_after(stream(), 1)
    assert rows_after(stream(num_threads=2), state) == rows_after(stream(), state) == [[8, 10]]
    edited = grain.MapDataset.range(12).shuffle(seed=3).map(lambda row: -row).batch(4)
    assert len(rows_after(edited, state_after(shuffled(), 2))) == 1


def test_state_of_an_infinite_dataset():
    state = state_after(shuffled().repeat(), 4)
    after = open_elements(shuffled().repeat()).iterate()
    after.set_state(state)
    assert after.get_state() == state
    with pytest.raises(NotResumableError, match="its length is"):
        rows_after(shuffled(), state)


def test_states_have_no_addresses_and_stay_short():
    parts = [shuffled().to_iter_dataset() for _ in range(100)]
    mixed = grain.IterDataset.mix(parts, weights=[1.0] * 100)
    state = state_after(mixed, 0)
    assert state == state_after(mixed, 0)
    assert len(state["transformations"]) < 1_200
    with pytest.raises(NotResumableError, match="transformations"):
        rows_after(grain.IterDataset.mix(parts[1:] + [stream()], weights=[1.0] * 100), state)
    zipped = grain.experimental.ZipMapDataset([grain.MapDataset.range(4), grain.MapDataset.range(4)])
    assert " at 0x" not in json.dumps(state_after(zipped, 0))


@pytest.mark.parametrize(
    "wrong",
    [
        {"iterator": None},
        {"iterator": {}},
        {"iterator": {"next_index": 99}},
        {"iterator": {"next_index": "one"}},
        {"position": -1},
        {"position": "one"},
    ],
)
def test_malformed_states_raise_and_do_not_move_the_pass(wrong):
    one_pass = open_elements(shuffled()).iterate()
    first = next(one_pass).tolist()
    state = one_pass.get_state()
    with pytest.raises(NotResumableError):
        one_pass.set_state({**state, **wrong})
    without = {name: value for name, value in state.items() if name != "iterator"}
    with pytest.raises(NotResumableError):
        one_pass.set_state(without)
    rest = [element.tolist() for element in one_pass]
    assert [first, *rest] == [element.tolist() for element in open_elements(shuffled()).iterate()]

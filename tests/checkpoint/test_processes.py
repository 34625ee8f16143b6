"""What several processes agree on when they save and restore. No process is started: the agreement is replaced."""

import jax.numpy as jnp
import numpy as np
import pytest

import replicax as rx
from live_members import Members
from replicax._src.checkpoint import agreement
from replicax._src.input.elements import NotResumableError
from replicax.errors import InvalidArgumentError


class Peers:
    def __init__(self, number, count):
        self.number, self._count = number, count
        self.names = [f"worker {n}" for n in range(count)]

    def __len__(self):
        return self._count


def restored(monkeypatch, states, count, merge=None):
    """What each of ``count`` processes restores."""
    results = []
    for number in range(count):
        peers = Peers(number, count) if count > 1 else None
        monkeypatch.setattr(agreement, "joined_peers", lambda peers=peers: peers)
        results.append(agreement.own_state("the data", states, merge or (lambda states: None)))
    return results


def test_each_process_restores_the_state_that_it_saved(monkeypatch):
    assert restored(monkeypatch, ["a", "b", "c"], 3) == ["a", "b", "c"]


@pytest.mark.parametrize("count", [1, 3])
def test_a_state_that_was_equal_in_all_processes_is_restored_in_any_number(monkeypatch, count):
    assert agreement.agreed_state(["a", "a"]) == ["a"]
    assert restored(monkeypatch, ["a"], count) == ["a"] * count


@pytest.mark.parametrize("count", [1, 3])
def test_states_of_another_number_of_processes_are_merged_or_an_error(monkeypatch, count):
    assert agreement.agreed_state(["a", "b"]) == ["a", "b"]
    assert restored(monkeypatch, ["a", "b"], count, "+".join) == ["a+b"] * count
    with pytest.raises(NotResumableError, match=f"for each of 2 processes, but now there are {count}"):
        restored(monkeypatch, ["a", "b"], count)


class Counted:
    def get_state(self):
        return 1

    def set_state(self, state):
        pass


def errors_of_saves(monkeypatch, folder, checkpoints):
    """The error of ``save`` in each process, of which each is a thread; None where it succeeds."""

    def error_of_save(member):
        try:
            checkpoints[member.number].write(folder / "exact")
        except InvalidArgumentError as error:
            return str(error)

    count = len(checkpoints)
    members = Members(monkeypatch, range(count), count, tolerates_failures=False)
    monkeypatch.setattr("replicax._src.checkpoint.checkpoint.write", lambda path, snapshot: 0)
    errors = members.run(error_of_save)
    return [errors[number] for number in range(count)]


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("tracked", "message"),
    [
        (
            {"extra": np.ones(3, np.float32)},
            r"'extra' is the first .* \(worker 0, worker 2: not tracked; worker 1: float32\[3\]\)",
        ),
        (
            {"counted": Counted(), "more": 1},
            r"'counted' is the first .* and 1 more differ .*worker 1: Python state",
        ),
        (
            {"v": jnp.ones((2, 3), jnp.bfloat16)},
            r"'v' is .* \(worker 0, worker 2: float32\[2\]; worker 1: bfloat16\[2, 3\]\)",
        ),
    ],
    ids=["array", "state", "shape"],
)
def test_object_that_only_one_process_saves_is_an_error_in_all(monkeypatch, tmp_path, tracked, message):
    same = {"v": jnp.ones(2)}
    checkpoints = [rx.Checkpoint(**same), rx.Checkpoint(**{**same, **tracked}), rx.Checkpoint(**same)]
    errors = errors_of_saves(monkeypatch, tmp_path, checkpoints)
    assert len(set(errors)) == 1
    with pytest.raises(InvalidArgumentError, match=message):
        raise InvalidArgumentError(errors[0])
    assert list(tmp_path.iterdir()) == []


def test_processes_that_track_the_same_objects_save(monkeypatch, tmp_path):
    checkpoints = [rx.Checkpoint(v=jnp.ones(2), counted=Counted(), n=n) for n in range(3)]
    assert errors_of_saves(monkeypatch, tmp_path, checkpoints) == [None] * 3

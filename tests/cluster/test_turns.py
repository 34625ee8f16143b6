"""The training thread answers the other tasks after a failure wherever it waits: otherwise nobody could continue."""

import threading
import time

import numpy as np
import pytest

from replicax._src.checkpoint.background import Background
from replicax._src.checkpoint.host_buffers import HostBuffers
from replicax._src.cluster import turns as turns_module
from replicax._src.cluster.failures import StateLostError
from replicax._src.cluster.turns import turns
from replicax._src.control.standing import Moment
from replicax._src.input.prefetch import Prefetcher
from replicax._src.preemption.barrier import PreemptionBarrier

pytestmark = pytest.mark.timeout(60)


class Peers:
    """Other tasks that continue once this one has answered, in its training thread."""

    names, number, tolerates_failures = ("worker 0", "worker 1"), 0, True

    def __init__(self):
        self.owner, self.are_answered, self.listeners = threading.get_ident(), threading.Event(), []

    def serve(self):
        assert threading.get_ident() == self.owner
        self.are_answered.set()
        for listener in self.listeners:
            listener({"kind": "resume", "round": 1})

    def moment(self):
        return Moment()

    def agree(self):
        """What a thread does that needs all tasks."""
        assert self.are_answered.wait(30)

    def check(self):
        pass

    def listen_for_saving(self, listener):
        self.listeners.append(listener)
        return self.listeners.clear

    def send_about_saving(self, message):
        pass


@pytest.fixture
def peers(monkeypatch):
    peers = Peers()
    monkeypatch.setattr(turns_module, "joined_peers", lambda: peers)
    return peers


def wait_for_a_save(peers):
    background = Background()
    background.start(peers.agree)
    background.wait()


def wait_for_the_memory_of_a_save(peers):
    buffers = HostBuffers()
    buffers.reserve()

    def save():
        peers.agree()
        buffers.free()

    threading.Thread(target=save).start()
    buffers.reserve()


def wait_for_a_batch(peers):
    def batches():
        peers.agree()
        yield np.zeros(2)

    assert len(list(Prefetcher(batches(), lambda: 1))) == 1


def wait_before_a_save(peers):
    barrier = PreemptionBarrier(peers, lambda number, text: None)
    barrier._hear({"kind": "pause", "round": 1})
    assert barrier.begin()
    barrier.close()


@pytest.mark.parametrize(
    "wait", [wait_for_a_save, wait_for_the_memory_of_a_save, wait_for_a_batch, wait_before_a_save]
)
def test_training_thread_answers_while_it_waits(peers, wait):
    wait(peers)
    assert peers.are_answered.is_set()


def test_failure_of_the_others_ends_the_wait(peers, monkeypatch):
    def fail():
        raise StateLostError("nobody has the state")

    monkeypatch.setattr(peers, "serve", fail)
    with pytest.raises(StateLostError):
        list(turns())


@pytest.mark.parametrize("tolerates_failures", [True, False])
def test_wait_ends_in_time(peers, monkeypatch, tolerates_failures):
    monkeypatch.setattr(peers, "tolerates_failures", tolerates_failures, raising=False)
    began = time.monotonic()
    for turn_s in turns(0.1):
        assert not threading.Event().wait(turn_s)
    assert 0.1 <= time.monotonic() - began < 5

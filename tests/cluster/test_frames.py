"""Messages of peers that are not messages: one error, and the controller's state stays sound."""

import json

import hypothesis
import hypothesis.strategies as st
import pytest

from replicax._src.cluster import control_messages
from replicax._src.control.controller import Controller
from replicax._src.wire.errors import ForeignPeerError


class Received:
    """A connection on which one message has arrived."""

    def __init__(self, text):
        self._text = text

    def receive(self, deadline):
        return self._text


def received(text):
    return control_messages.receive(Received(text), 0.0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"[" * 100_000, "nested more deeply"),
        (b'{"kind": "offer", "value": ' + b"[" * 300 + b"]" * 300 + b"}", "nested more deeply"),
        (b"", "not JSON"),
        (b"[]", "not an object"),
        (b"{}", "no 'kind'"),
        (b'{"kind": 1}', "kind is 1"),
        (b'{"kind": "hello", "member": -1}', "member is -1"),
        (b'{"kind": "heartbeat", "status": {"position": "1"}}', "position is '1'"),
    ],
)
def test_what_is_no_message_is_from_a_foreign_peer(text, says):
    with pytest.raises(ForeignPeerError, match=says):
        received(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.sampled_from((-1, 0, 1, 2**80, 0.5, float("inf"), "", "in", "0 step")),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(("position", "a")), inner, max_size=2)
    ),
    max_leaves=4,
)
STATUS = st.fixed_dictionaries(
    {}, optional={"position": JSON, "program": JSON, "doing": JSON, "callback": JSON, "done": JSON}
)
FIELDS = {
    "status": STATUS | JSON,
    **dict.fromkeys(("figures", "key", "value", "position", "text", "round", "started", "is_final"), JSON),
}
KINDS = (
    "heartbeat",
    "watch",
    "offer",
    "raised",
    "left",
    "watching",
    "closed",
    "signal",
    "told",
    "paused",
    "saved",
)
MESSAGES = st.builds(
    lambda kind, fields: {"kind": kind, **fields},
    st.sampled_from(KINDS),
    st.fixed_dictionaries({}, optional=FIELDS),
)


@hypothesis.given(messages=st.lists(st.tuples(st.integers(0, 1), MESSAGES), max_size=6))
def test_wrong_messages_do_not_break_the_controller(messages):
    controller = Controller(["worker 0", "worker 1"])
    for number in range(2):
        assert controller.join(number, 0.0) is None
    for number, message in messages:
        try:
            controller.receive(number, received(json.dumps(message).encode()), 1.0)
        except (ForeignPeerError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            controller.disconnect(number, 1.0)
        json.dumps(controller.tick(2.0))
        json.dumps(controller.tick(1000.0))

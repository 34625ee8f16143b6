"""``RemoteValue``: it is not the result, and says how to get it."""

import operator

import pytest

from checks import message
from replicax._ps.coordinator.remote_value import RemoteValue
from replicax.errors import InvalidArgumentError

USES = {
    "float": float,
    "int": int,
    "format": "{:.4f}".format,
    "unpack": lambda value: [*value],
    "index": operator.itemgetter("loss"),
    "add": lambda value: value + 1.0,
    "add to": lambda value: 1.0 + value,
    "sum": lambda value: sum([value, value]),
    "divide": lambda value: value / 2,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_use_of_a_result_that_was_not_fetched_says_how_to_fetch_it(use):
    message(InvalidArgumentError, lambda: use(RemoteValue("step", None)), "'step'", "value.fetch()")


def test_a_result_that_was_not_fetched_can_be_printed():
    assert f"{RemoteValue('step', None)}" == "<RemoteValue of 'step', waiting>"

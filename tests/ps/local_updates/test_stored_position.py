"""``StoredPosition``: what a server stores of a group's progress."""

import numpy as np
import pytest

from replicax._ps.local_updates.stored_position import NUM_POSITION_BYTES, StoredPosition
from replicax.errors import InvalidArgumentError


def test_position_comes_back_and_nothing_stored_is_the_beginning():
    position = StoredPosition(7, 2**40, [{"batch": 3, "seeds": [1, 2]}, None])
    assert StoredPosition.decoded(position.encoded()) == position
    assert StoredPosition.decoded(np.zeros(NUM_POSITION_BYTES, np.uint8)) == StoredPosition(0, 0, None)


def test_position_that_cannot_be_stored_or_read_says_what_to_do():
    with pytest.raises(InvalidArgumentError, match=r"bytes, compressed, and the syncers store 1022"):
        StoredPosition(data=[np.random.default_rng(0).bytes(2500).hex()]).encoded()
    with pytest.raises(InvalidArgumentError, match="no JSON value"):
        StoredPosition(data=[{1}]).encoded()
    damaged = StoredPosition(7, 8, [3]).encoded()
    damaged[5] ^= 255
    with pytest.raises(InvalidArgumentError, match="delete its snapshots"):
        StoredPosition.decoded(damaged)

"""``StateValues``, and the programs of a fragment that no gradient changes."""

import numpy as np
from fragment_store import FragmentStore

from replicax._ps.local_updates.state_values import StateValues


def test_pushes_are_values_and_adopted_values_are_the_outer_ones():
    values = StateValues(1.0)
    assert values.take(1, 0.5) == 0.5
    assert values.take(2, 0.25) == 0.25
    assert values.adopt(0.125, 0.75, keeps=[2], returns=[1]) == 0.75
    assert (values.start, values.pushes) == (0.75, {2: 0.25})


def test_round_takes_the_mean_of_the_newest_values_by_rows():
    store = FragmentStore(2, 3, is_state=True).begin([1.0, 1.0], rate=0.5, decay=0.9)
    for member in range(3):
        store.claim(member, 7 + member)
    store.push(0, 7, 1, 0, 2, [9.0, 9.0])
    store.push(0, 7, 2, 1, 1, [0.5, 0.25])  # the newer values, with the rows of both
    store.push(1, 8, 1, 0, 1, [0.1, 0.05])
    store.close(0, 2)
    np.testing.assert_allclose(store.read("theta"), [0.4, 0.2], rtol=1e-6)
    store.push(2, 9, 1, 0, 5, [0.3, 0.1])  # late, and not added to a change that others have made too
    store.close(1, 1, is_flush=True)
    np.testing.assert_allclose(store.read("theta"), [0.3, 0.1], rtol=1e-6)

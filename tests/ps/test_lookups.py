"""The rows that a lookup needs, their places, and the data that is sent back."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from replicax._ps.client.row_requests import RowsWanted, gradient_operands, padded
from replicax._ps.programs.programs import Shard


@st.composite
def tables(draw):
    """Shards of a table, which may have no rows."""
    sizes = draw(st.lists(st.integers(0, 5), min_size=1, max_size=4))
    if len(sizes) == 1:
        return [Shard(0, "t")], sizes[0]
    ends = np.cumsum(sizes).tolist()
    pieces = [
        Shard(index % 2, f"t/{index}", (end - size, end))
        for index, (size, end) in enumerate(zip(sizes, ends, strict=True))
    ]
    return pieces, ends[-1]


@given(tables(), st.lists(st.integers(-3, 25), max_size=12))
def test_rows_come_back_where_the_ids_were(table_of, ids):
    pieces, num_rows = table_of
    table = np.arange(num_rows * 2).reshape(num_rows, 2) + 1
    ids = np.array(ids, np.int32).reshape(-1, 1)
    wanted = RowsWanted.of(ids, pieces, num_rows)
    by_key = {piece.key: table if piece.rows is None else table[slice(*piece.rows)] for piece in pieces}
    parts = [by_key[key][numbers] for _, key, numbers in wanted.parts]
    rows = padded(parts, wanted.num_ids)
    assert rows.shape == (ids.size, 2)
    has_row = (ids >= 0) & (ids < num_rows)
    assert wanted.has_all == has_row.all()
    np.testing.assert_array_equal(wanted.positions[~has_row], ids.size)
    np.testing.assert_array_equal(rows[wanted.positions[has_row]], table[ids[has_row]])
    assert len(np.unique(ids[has_row])) == sum(len(numbers) for _, _, numbers in wanted.parts)


@given(tables(), st.lists(st.integers(-3, 25), min_size=1, max_size=12))
def test_gradients_arrive_at_their_rows(table_of, ids):
    pieces, num_rows = table_of
    ids = np.array(ids, np.int32)
    wanted = RowsWanted.of(ids, pieces, num_rows)
    gradients = np.zeros((ids.size, 2))
    np.add.at(gradients, wanted.positions[wanted.positions < ids.size], 1.0)
    expected = np.zeros((num_rows, 2))
    np.add.at(expected, ids[(ids >= 0) & (ids < num_rows)], 1.0)
    updated = []
    for piece in pieces:
        size = num_rows if piece.rows is None else piece.rows[1] - piece.rows[0]
        numbers, values = gradient_operands(wanted, gradients, piece.key, size)
        assert numbers.shape == (ids.size,)
        assert numbers.dtype == np.int32
        assert values.shape == gradients.shape
        shard = np.zeros((size + 1, 2))  # its last row is what the filler says
        np.add.at(shard, numbers, values)
        updated.append(shard[:-1])
    np.testing.assert_array_equal(np.concatenate(updated), expected)

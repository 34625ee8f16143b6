"""Groups of devices: the text of compiled programs, compared with the arrays that made it."""

import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from replicax._plan.collective_groups import axes_of, first_group


@pytest.mark.parametrize(
    ("text", "members"),
    [
        ("all-reduce(%x), channel_id=1, replica_groups={{0,2},{1,3}}, to_apply=%add", [0, 2]),
        ("all-reduce(%x), replica_groups=[4,2]<=[8], use_global_device_ids=true", [0, 1]),
        ("all-reduce(%x), replica_groups=[2,4]<=[4,2]T(1,0)", [0, 2, 4, 6]),
        ("all-gather(%x), replica_groups=[4,4]<=[2,2,4]T(0,2,1)", [0, 4, 1, 5]),
        ("collective-permute(%x), source_target_pairs={{0,1},{1,0},{2,3}}", [0, 1]),
        ("all-reduce(%x), replica_groups=mesh['replica'=2,'logical'=3] {'replica'}", [0, 3]),
        (
            "all-reduce(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x=true",
            [0, 2, 4, 6],
        ),
        ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a'}, x=true", [0, 1]),
        ("all-reduce(%x), replica_groups=mesh['a'=2,'b'=2], device_ids=(3,2,1,0) {'b'}", [3, 2]),
        ("all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}, dimensions={0}", [0, 4]),
        ("all-gather(%x), replica_groups=mesh['a'=4,'b'=2] {'a':(2)2,'b'}, dimensions={0}", [0, 1, 2, 3]),
        ("all-reduce(%x), replica_groups={}, to_apply=%add", None),
    ],
)
def test_groups_as_they_are_printed(text, members):
    assert first_group(text) == members


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.data())
def test_axes_are_those_along_which_a_group_was_made(shape, data):
    sizes = {f"axis_{i}": size for i, size in enumerate(shape)}
    along = [i for i, size in enumerate(shape) if size > 1 and data.draw(st.booleans())]
    others = [i for i in range(len(shape)) if i not in along]
    order = [*others, *along]
    count = math.prod(shape[i] for i in along)
    groups = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1, count)
    printed = (
        f"replica_groups=[{len(groups)},{count}]<=[{','.join(map(str, shape))}]T({','.join(map(str, order))})"
    )
    assert first_group(printed) == groups[0].tolist()
    wanted = tuple(f"axis_{i}" for i in along)
    assert axes_of(groups[0].tolist(), sizes) == wanted
    assert all(axes_of(group.tolist(), sizes) == wanted for group in groups)
    assert axes_of(None, sizes) == tuple(name for name, size in sizes.items() if size > 1)

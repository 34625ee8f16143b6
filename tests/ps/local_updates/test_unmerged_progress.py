"""What a group has not pushed is ``w - base``, whatever is late, lost or returned."""

from replicax._ps.local_updates.unmerged_progress import UnmergedProgress


def test_push_is_the_way_back_and_the_next_begins_where_it_ended():
    progress = UnmergedProgress(100)
    assert progress.take(1, 107) == -7
    assert progress.take(2, 107) == 0
    assert progress.take(3, 110) == -3


def test_adopting_keeps_what_was_not_pushed_and_pushes_of_later_versions():
    progress = UnmergedProgress(100)
    progress.take(1, 107)
    progress.take(2, 110)
    assert progress.adopt(115, 207, keeps=(2,)) == 207 + 3 + 5
    assert progress.pushes == {2: -3}
    assert progress.take(3, 215) == -5
    assert progress.adopt(215, 215, keeps=()) == 215
    assert progress.pushes == {}


def test_returned_pushes_are_part_of_the_next_one():
    progress = UnmergedProgress(100)
    progress.take(1, 107)
    progress.take(2, 110)
    w = progress.adopt(111, 50, keeps=(2,), returns=(1,))
    assert w == 50 + 3 + 7 + 1
    assert progress.take(3, w) == -(7 + 1)


def test_dropping_forgets_what_was_not_pushed_even_if_it_is_not_finite():
    progress = UnmergedProgress(1.0)
    progress.take(1, 2.0)
    assert progress.adopt(float("nan"), 5.0, keeps=(1,), drops=True) == 6.0

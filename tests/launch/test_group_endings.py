"""What the end of a group or of a syncer means for the others."""

from replicax._launch.group_endings import FinishSyncers, GroupEndings, Say


def texts(actions):
    return [action.text for action in actions if isinstance(action, Say)]


def test_syncers_end_with_the_last_group():
    rules = GroupEndings(["group 0", "group 1"])
    assert rules.group_ended("group 1", 0) == []
    assert rules.group_ended("group 0", 0) == [FinishSyncers()]
    assert rules.syncer_ended("syncer 0", 0) == []
    assert rules.exit_code == 0


def test_group_that_fails_leaves_the_others_and_the_code_is_that_of_the_first():
    rules = GroupEndings(["group 0", "group 1", "group 2"])
    (said,) = texts(rules.group_ended("group 2", 7))
    assert "group 2 has failed, with exit code 7" in said
    assert "group 0, group 1 continue." in said
    assert rules.group_ended("group 1", 0) == []
    last = rules.group_ended("group 0", 137)
    assert texts(last) == ["Failed: group 2 (exit code 7), group 0 (exit code 137). Finished: group 1."]
    assert last[-1] == FinishSyncers()
    assert rules.exit_code == 7


def test_syncer_that_fails_ends_no_group_and_is_the_exit_code_if_none_fails():
    rules = GroupEndings(["group 0"])
    (said,) = texts(rules.syncer_ended("syncer 1", 137))
    assert said.startswith("syncer 1 has failed, with exit code 137.")
    assert rules.group_ended("group 0", 0) == [FinishSyncers()]
    assert rules.exit_code == 137


def test_syncer_that_fails_while_it_ends_is_no_failure():
    rules = GroupEndings(["group 0"])
    rules.group_ended("group 0", 0)
    assert rules.syncer_ended("syncer 0", 137) == []
    assert rules.exit_code == 0


def test_after_a_signal_nothing_is_said_and_the_first_signal_is_the_code():
    rules = GroupEndings(["group 0", "group 1"])
    rules.signal(2)
    rules.signal(15)
    assert texts(rules.group_ended("group 0", 130)) == []
    assert rules.syncer_ended("syncer 0", 130) == []
    assert rules.group_ended("group 1", 130) == [FinishSyncers()]
    assert rules.exit_code == 130

"""The rules by which live members continue after a failure: both sides, one event after the other."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.cluster.failures import PeerFailureError, StateLostError, StateMismatchError, lost_error
from replicax._src.control.epoch_member import (
    Await,
    Begin,
    Data,
    EpochMember,
    Give,
    Offers,
    Send,
    Stop,
)
from replicax._src.control.epochs import NUM_BLAMED, NUM_VAIN, EpochAgreement, replicas_of


def report(epoch, version, **more):
    return {"kind": "report", "epoch": epoch, "version": version, **more}


def finished(epoch, version):
    return {"kind": "finished", "epoch": epoch, "version": version}


def started(num_tasks, version=0, **options):
    epochs = EpochAgreement(num_tasks, **options)
    for number in range(num_tasks):
        outbox = epochs.receive(number, report(0, version))
    assert kinds(outbox) == ["form"] * num_tasks
    return epochs


def kinds(outbox):
    return [message["kind"] for _, message in outbox]


def form_of(outbox):
    """The form, the same for all."""
    forms = [message for _, message in outbox if message["kind"] == "form"]
    assert forms
    assert all(form == forms[0] for form in forms)
    return forms[0]


@given(st.integers(1, 9), st.data())
def test_every_replica_has_one_member_and_no_member_has_two_more_than_another(num_replicas, data):
    members = sorted(data.draw(st.sets(st.integers(0, num_replicas - 1), min_size=1)))
    replicas = replicas_of(num_replicas, members)
    assert sorted(r for each in replicas.values() for r in each) == list(range(num_replicas))
    assert all(replicas[number][0] == number for number in members)
    counts = [len(each) for each in replicas.values()]
    assert max(counts) - min(counts) <= 1


def test_next_epoch_is_formed_when_all_live_members_have_reported():
    epochs = started(4)
    assert kinds(epochs.lose(2, "died")) == ["end"] * 3
    assert epochs.receive(0, report(1, 5)) == []
    assert epochs.awaited == [1, 3]
    assert epochs.receive(3, report(1, 6)) == []
    form = form_of(epochs.receive(1, report(1, 6)))
    assert form["members"] == [0, 1, 3]
    assert (form["source"], form["version"], form["behind"], form["entering"]) == (1, 6, [0], [])
    assert form["gone"] == [[2, "died", ""]]


def test_death_during_an_agreement_changes_only_who_is_awaited():
    epochs = started(3)
    epochs.receive(2, report(1, 6))  # the highest version dies with it
    epochs.receive(0, report(1, 5))
    assert epochs.lose(2, "died") == []
    form = form_of(epochs.receive(1, report(1, 5)))
    assert (form["members"], form["source"], form["version"], form["behind"]) == ([0, 1], 0, 5, [])


def test_second_report_of_an_epoch_and_reports_of_earlier_ones_do_not_count():
    epochs = started(2)
    epochs.receive(0, report(1, 3))
    form_of(epochs.receive(1, report(1, 3)))
    assert epochs.receive(0, report(1, 3)) == []
    assert epochs.is_running


@pytest.mark.parametrize(
    ("versions", "members"),
    [([(4, "a"), (4, "b"), (4, "a")], [0, 1]), ([(4, None), (4, "a"), (4, "b")], [1, 2]), ([(4, "a"), (5, "b"), (5, "c")], [1, 2]), ([(3, None), (5, None), (4, None)], [0, 1])],
)  # fmt: skip
def test_members_that_differ_are_both_named(versions, members):
    epochs = started(3)
    for number, (version, digest) in enumerate(versions):
        outbox = epochs.receive(number, report(1, version, digest=digest))
    assert outbox == [(n, {"kind": "lost", "reason": "differs", "members": members}) for n in range(3)]
    assert epochs.has_ended


def test_members_that_begin_with_different_versions_are_both_named():
    epochs = EpochAgreement(2)
    epochs.receive(0, report(0, 0))
    assert epochs.receive(1, report(0, 1))[0][1] == {"kind": "lost", "reason": "differs", "members": [0, 1]}


def test_newcomer_enters_only_where_the_source_is_open_and_has_no_state_whatever_it_reports():
    epochs = started(3)
    epochs.lose(2, "died")
    epochs.receive(0, report(1, 7))
    epochs.receive(1, report(1, 7))
    waits = {"kind": "waits", "members": [2]}
    assert epochs.receive(2, report(0, 0, address="c:1")) == [(0, waits), (1, waits)]
    epochs.receive(0, report(2, 7))
    outbox = epochs.receive(1, report(2, 7, is_open=True))  # not the source
    assert form_of(outbox)["members"] == [0, 1]
    assert outbox[-2:] == [(0, waits), (1, waits)]
    epochs.receive(0, report(3, 7, is_open=True))
    outbox = epochs.receive(1, report(3, 7))
    form = form_of(outbox)
    assert (form["members"], form["entering"], form["behind"]) == ([0, 1, 2], [2], [])
    assert form["addresses"] == ["", "", "c:1"]
    assert [to for to, _ in outbox] == [0, 1, 2]


def test_members_are_told_when_a_newcomer_that_waits_is_gone():
    epochs = started(3)
    epochs.lose(2, "died")
    for number in range(2):
        epochs.receive(number, report(1, 7))
    epochs.receive(2, report(0, None))
    assert epochs.lose(2, "died") == [(number, {"kind": "waits", "members": []}) for number in range(2)]
    assert epochs.lose(2, "died") == []


def test_newcomer_that_has_not_got_the_state_is_a_newcomer_again():
    epochs = started(2)
    epochs.lose(1, "died")
    epochs.receive(0, report(1, 7))
    epochs.receive(1, report(0, None))
    form_of(epochs.receive(0, report(2, 7, is_open=True)))
    epochs.receive(1, report(3, None))
    outbox = epochs.receive(0, report(3, 7))
    assert (form_of(outbox)["members"], kinds(outbox)) == ([0], ["form", "waits"])


def entered(version=7, entering=2, num_tasks=3):
    """A run in which a task has died, and its replacement has entered at a version, in epoch 3."""
    epochs = started(num_tasks)
    others = [number for number in range(num_tasks) if number != entering]
    epochs.lose(entering, "died")
    for number in others:
        epochs.receive(number, report(1, version))
    epochs.receive(entering, report(0, None))
    for number in others:
        outbox = epochs.receive(number, report(2, version, is_open=True))
    assert form_of(outbox)["solo"] == form_of(outbox)["entering"] == [entering]
    return epochs


def reported(epochs, epoch, versions):
    for number, version in versions.items():
        outbox = epochs.receive(number, report(epoch, version))
    return form_of(outbox)


def test_member_that_entered_is_solo_in_each_epoch_of_this_version_and_no_longer():
    epochs = entered(7)
    assert (epochs.is_solo(2, 7), epochs.is_solo(2, 8), epochs.is_solo(0, 0)) == (True, False, False)
    assert reported(epochs, 3, {0: 7, 1: 7, 2: 7})["solo"] == [2]
    form = reported(epochs, 4, {0: 8, 1: 7, 2: 7})
    assert (form["solo"], form["behind"]) == ([], [1, 2])


def test_member_that_entered_is_the_source_only_if_nobody_else_has_the_version():
    epochs = entered(7, entering=0)
    form = reported(epochs, 3, {0: 7, 1: 7, 2: 6})
    assert (form["source"], form["behind"], form["solo"]) == (1, [2], [0])
    epochs.lose(1, "died")
    form = reported(epochs, 4, {0: 7, 2: 6})
    assert (form["source"], form["behind"], form["solo"]) == (0, [2], [0])


def test_replacement_of_a_member_that_entered_enters_like_every_newcomer():
    epochs = entered(7)
    epochs.lose(2, "died")
    assert reported(epochs, 3, {0: 7, 1: 7})["solo"] == []
    epochs.receive(2, report(0, None))
    epochs.receive(0, report(4, 9, is_open=True))
    assert form_of(epochs.receive(1, report(4, 9)))["solo"] == [2]


def test_run_is_lost_if_nobody_alive_has_the_state():
    epochs = started(2)
    epochs.lose(1, "died")
    epochs.receive(0, report(1, 7))
    epochs.receive(1, report(0, None))
    form_of(epochs.receive(0, report(2, 7, is_open=True)))
    epochs.lose(0, "died")
    assert epochs.receive(1, report(3, None)) == [(1, {"kind": "lost", "reason": "state", "members": [0]})]


def test_waiting_newcomers_are_told_that_the_run_is_lost():
    epochs = started(2)
    epochs.lose(1, "died")
    epochs.receive(0, report(1, 7))
    epochs.receive(1, report(0, None))
    assert epochs.lose(0, "died") == [(1, {"kind": "lost", "reason": "state", "members": [0]})]


def test_too_few_workers_and_a_death_at_the_start_end_the_run():
    epochs = started(3, min_workers=2)
    assert kinds(epochs.lose(0, "died")) == ["end"] * 2
    epochs.lose(2, "silent")
    lost = {"kind": "lost", "reason": "few", "members": [0, 2], "num_left": 1, "min_workers": 2}
    assert epochs.receive(1, report(1, 4)) == [(1, lost)]
    epochs = EpochAgreement(2)
    epochs.receive(0, report(0, 0))
    assert epochs.lose(1, "died")[0] == (0, {"kind": "lost", "reason": "start", "members": [1]})


def test_all_leave_together_and_a_death_before_brings_back_those_that_had_finished():
    epochs = started(3)
    for number in (0, 2):
        assert epochs.receive(number, finished(1, 9)) == []
    assert kinds(epochs.lose(2, "died")) == ["end"] * 2
    assert epochs.receive(1, finished(1, 9)) == []  # that epoch has ended
    epochs.receive(0, report(1, 9))
    assert form_of(epochs.receive(1, report(1, 8)))["behind"] == [1]
    assert epochs.receive(0, finished(2, 9)) == []
    over = {"kind": "over", "epoch": 2}
    assert epochs.receive(1, finished(2, 9)) == [(0, over), (1, over)]


def test_members_that_finish_different_numbers_of_steps_are_named():
    epochs = started(2)
    epochs.receive(0, finished(1, 9))
    assert epochs.receive(1, finished(1, 8))[0][1] == {"kind": "lost", "reason": "differs", "members": [0, 1]}


def in_vain(epochs, reports, num):
    for _ in range(num):
        for number, more in enumerate(reports):
            outbox = epochs.receive(number, report(epochs.number, 4, **more))
    return outbox


def test_member_that_others_cannot_reach_is_given_up():
    epochs = started(3)
    reports = [{"blamed": 2}, {"blamed": 2}, {"blamed": 0}]
    form_of(in_vain(epochs, reports, NUM_BLAMED))
    outbox = in_vain(epochs, reports, 1)
    assert outbox[0] == (2, {"kind": "given_up"})
    form = form_of(outbox[1:])
    assert (form["members"], form["gone"]) == ([0, 1], [[2, "unreachable", ""]])


def test_member_is_given_up_for_epochs_in_a_row_only():
    epochs = started(3)
    reports = [{"blamed": 2}, {"blamed": 2}, {}]
    for version in range(4, 4 + 2 * NUM_BLAMED):
        for _ in range(2):
            for number, more in enumerate(reports):
                outbox = epochs.receive(number, report(epochs.number, version, **more))
            assert form_of(outbox)["members"] == [0, 1, 2]


def test_epochs_in_which_somebody_died_are_not_in_vain():
    epochs = started(3)
    epochs.lose(2, "died")
    epochs.receive(0, report(1, 4))
    epochs.receive(1, report(1, 4))
    for _ in range(NUM_BLAMED + 1):
        epochs.receive(2, report(0, None))
        epochs.receive(0, report(epochs.number, 4, is_open=True))
        assert form_of(epochs.receive(1, report(epochs.number, 4)))["entering"] == [2]
        epochs.lose(2, "died")
        epochs.receive(0, report(epochs.number, 4, blamed=1))
        assert form_of(epochs.receive(1, report(epochs.number, 4)))["members"] == [0, 1]


def vain_entry(epochs):
    """Lets task 1 enter, and ends the epoch before it has the state."""
    form_of(epochs.receive(0, report(epochs.number, 7, is_open=True)))
    epochs.receive(1, report(epochs.number, None))
    return epochs.receive(0, report(epochs.number, 7))


def test_newcomer_is_given_up_after_several_vain_entries_but_not_once_it_has_the_state():
    outcomes = []
    for num_vain in (NUM_BLAMED - 1, NUM_BLAMED):
        epochs = started(2)
        epochs.lose(1, "died")
        epochs.receive(0, report(1, 7))
        epochs.receive(1, report(0, None))
        for _ in range(num_vain):
            outbox = vain_entry(epochs)
        outcomes.append(kinds(outbox)[0])
    assert outcomes == ["form", "given_up"]
    epochs = started(2)
    epochs.lose(1, "died")
    epochs.receive(0, report(1, 7))
    epochs.receive(1, report(0, None))
    for _ in range(NUM_BLAMED - 1):
        vain_entry(epochs)
    form_of(epochs.receive(0, report(epochs.number, 7, is_open=True)))
    epochs.receive(1, report(epochs.number, 7))
    assert form_of(epochs.receive(0, report(epochs.number, 7)))["members"] == [0, 1]


def test_run_is_lost_if_all_steps_fail_and_nobody_is_to_blame():
    epochs = started(2)
    outbox = in_vain(epochs, [{}, {}], NUM_VAIN + 2)
    assert outbox[0][1] == {"kind": "lost", "reason": "unreachable", "members": []}


# --- a member -----------------------------------------------------------------------------------------


def form(epoch, members, version=0, source=0, behind=(), entering=(), gone=(), solo=None):
    return {
        "kind": "form", "epoch": epoch, "members": list(members), "version": version, "source": source,
        "behind": list(behind), "entering": list(entering), "gone": list(gone), "addresses": [""] * len(members),
        "solo": list(entering if solo is None else solo),
    }  # fmt: skip


def member_in(epoch, number=0, members=(0, 1), version=0):
    member = EpochMember(number)
    assert member.enter(version) == [Send(report(0, version))]
    begin = Begin(epoch, tuple(members), ("",) * len(members), ())
    assert member.receive(form(epoch, members, version)) == [begin]
    assert member.may_step
    return member


def test_member_reports_once_and_may_not_commit_afterwards():
    member = member_in(1)
    member.commit()
    assert member.fail(blamed=1) == [Send(report(1, 1, blamed=1))]
    assert not member.may_step
    assert member.receive({"kind": "end", "epoch": 1}) == []
    assert member.fail() == []
    with pytest.raises(AssertionError):
        member.commit()


def test_end_that_comes_before_its_form_ends_the_epoch_at_once():
    member = EpochMember(0)
    member.enter(0)
    assert member.receive({"kind": "end", "epoch": 1}) == []
    assert member.receive(form(1, [0, 1])) == [Send(report(1, 0))]
    assert not member.may_step


def test_source_gives_sums_to_those_behind_and_the_state_to_newcomers():
    member = member_in(1, members=(0, 1, 2))
    member.commit()
    member.receive({"kind": "end", "epoch": 1})
    actions = member.receive(form(2, [0, 1, 3], 1, source=0, behind=[1], entering=[3]))
    assert actions[0].giver == 0
    assert actions[1:] == [Give(1, Data.SUMS, 1), Give(3, Data.STATE, 1)]
    assert member.may_step


def test_member_behind_commits_when_it_has_the_sums():
    member = member_in(1, number=1)
    member.fail()
    assert member.receive(form(2, [0, 1], 1, behind=[1]))[1:] == [Await(0, Data.SUMS, 1)]
    assert not member.may_step
    assert member.catch_up() == []
    assert (member.version, member.may_step) == (1, True)


def test_member_whose_source_dies_stays_at_its_version():
    member = member_in(1, number=1)
    member.fail()
    member.receive(form(2, [0, 1], 1, behind=[1]))
    assert member.receive({"kind": "end", "epoch": 2}) == [Send(report(2, 0))]
    assert member.awaited_data is None
    with pytest.raises(AssertionError):
        member.catch_up()
    assert (member.version, member.may_step) == (0, False)


def test_finished_member_finishes_again_in_each_epoch_and_serves_the_others():
    member = member_in(1)
    member.commit()
    assert member.finish() == [Send(finished(1, 1))]
    assert not member.may_step
    assert member.receive({"kind": "end", "epoch": 1}) == [Send(report(1, 1))]
    actions = member.receive(form(2, [0, 1], 1, behind=[1]))
    assert actions[1:] == [Give(1, Data.SUMS, 1), Send(finished(2, 1))]
    over = {"kind": "over", "epoch": 2}
    assert member.receive(over) == [Stop("over", over)]


@pytest.mark.parametrize(
    "message", [{"kind": "given_up"}, {"kind": "lost", "reason": "few", "members": []}, None]
)
def test_member_that_is_given_up_stops_for_good(message):
    member = member_in(1)
    (stop,) = member.disconnect() if message is None else member.receive(message)
    assert isinstance(stop, Stop)
    assert member.has_stopped
    assert not member.may_step
    assert member.receive(form(2, [0, 1])) == member.disconnect() == member.fail() == member.open() == []


def test_chief_is_the_lowest_live_member():
    member = member_in(1, number=1)
    assert not member.is_chief
    member.fail()
    member.receive(form(2, [1, 2]))
    assert member.is_chief


def test_newcomer_is_solo_until_it_has_committed_a_step_and_the_others_compare_then():
    newcomer = EpochMember(0)
    newcomer.enter(None)
    assert (newcomer.is_solo, newcomer.participants) == (True, ())
    other = member_in(1, number=1, members=(1, 2), version=5)
    assert not other.must_compare
    other.fail()
    (begin, _) = newcomer.receive(form(2, [0, 1, 2], 5, source=1, entering=[0]))
    assert other.receive(form(2, [0, 1, 2], 5, source=1, entering=[0]))[0] == begin
    assert begin.entering == (0,)
    newcomer.catch_up()
    for member, is_solo, is_chief in ((newcomer, True, False), (other, False, True)):
        assert (member.is_solo, member.is_chief) == (is_solo, is_chief)
        assert (member.participants, member.must_compare, member.reference) == ((1, 2), True, 1)
        member.commit()
        assert (member.is_solo, member.participants, member.must_compare) == (False, (0, 1, 2), False)
        assert (member.is_chief, member.reference) == (not is_chief, 0)


def test_member_that_is_behind_a_newcomer_takes_part_before_it_does():
    member = member_in(1, number=1, version=4)
    member.fail()
    member.receive(form(2, [0, 1], 5, source=0, behind=[1], solo=[0]))
    member.catch_up()
    assert (member.participants, member.is_chief, member.must_compare) == ((1,), True, True)


def test_two_newcomers_alone_agree_on_the_reference_and_have_no_chief():
    members = [EpochMember(number) for number in range(2)]
    for member in members:
        member.enter(5)
        member.receive(form(2, [0, 1], 5, solo=[0, 1]))
        assert (member.participants, member.is_chief, member.is_solo) == ((), False, True)
        assert (member.must_compare, member.reference) == (True, 0)


def test_newcomers_that_have_entered_do_not_wait_any_more():
    member = member_in(1)
    member.receive({"kind": "waits", "members": [2]})
    assert member.waiting == (2,)
    member.open()
    member.receive(form(2, [0, 1, 2], entering=[2]))
    assert member.waiting == ()


def test_offers_that_wait_are_made_again_in_the_next_epoch():
    offers = Offers()
    assert offers.form(1) == []
    offer = {"kind": "offer", "key": "k", "value": 3}
    assert offers.offer(offer) == {**offer, "epoch": 1}
    offers.offer({**offer, "key": "done"})
    offers.gathered("done")
    assert offers.form(2) == [{**offer, "epoch": 2}]


@pytest.mark.parametrize(
    ("reason", "error", "words"),
    [
        (
            "state",
            StateLostError,
            "No task that is left has the state of the training: worker 1 and worker 2 had it",
        ),
        ("differs", StateMismatchError, "worker 1 and worker 2 report different states"),
        (
            "few",
            PeerFailureError,
            "2 tasks are left, and `min_workers` is 3: worker 1 and worker 2 are gone.",
        ),
        ("few", PeerFailureError, "give FaultToleranceOptions(min_workers=...) a smaller number"),
        ("start", PeerFailureError, "worker 1 and worker 2 ended before all tasks had started"),
        ("unreachable", PeerFailureError, "Check the network"),
        ("given_up", PeerFailureError, "worker 0 was silent for too long"),
        ("cut_off", PeerFailureError, "worker 0 has lost its connection to the controller"),
    ],
)
def test_error_of_a_process_that_stops_names_the_tasks(reason, error, words):
    message = {"members": [1, 2], "num_left": 2, "min_workers": 3}
    found = lost_error(["worker 0", "worker 1", "worker 2"], 0, reason, message)
    assert type(found) is error
    assert words in str(found)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        ("state", "worker 1 had it, and is gone."),
        ("few", "1 task is left, and `min_workers` is 2: worker 1 is gone."),
    ],
)
def test_error_of_a_process_that_stops_because_of_one_task_is_in_the_singular(reason, words):
    message = {"members": [1], "num_left": 1, "min_workers": 2}
    assert words in str(lost_error(["worker 0", "worker 1"], 0, reason, message))

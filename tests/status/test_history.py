"""The curves of a job: how they are thinned, how they are kept over a restart, and how they are drawn."""

import itertools
import json
import re
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from replicax._src.status.curves import MOST_DRAWN, pictures
from replicax._src.status.history import MOST_BYTES, MOST_CURVES, MOST_POINTS, History
from replicax._src.status.history_file import HistoryFile
from replicax._src.untrusted.strict_json import TextError

DAY = 86_400


def filled(num, start=0, **curves):
    history = History()
    for second in range(start, start + num):
        history.add(float(second), {name: value(second) for name, value in curves.items()})
    return history


def test_points_are_seconds_until_there_are_too_many():
    history = filled(MOST_POINTS, loss=float)
    assert history.interval_s == 1
    assert history.points("loss") == [(second, second) for second in range(MOST_POINTS)]
    history.add(MOST_POINTS, {"loss": 7.0})
    assert history.interval_s == 2
    assert history.points("loss")[:2] == [(0, 0.5), (2, 2.5)]
    assert history.points("loss")[-1] == (MOST_POINTS, 7.0)


TIMES = st.lists(st.integers(1, 50), max_size=300)


@given(TIMES, st.integers(2, 64))
def test_points_are_the_means_over_equal_intervals_whenever_they_were_joined(steps, most):
    """A point depends on the values of its interval alone: the whole curve is that of the final interval."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("replicax._src.status.history.MOST_POINTS", most)
        history, now, values = History(), 1000, {}
        for number, step in enumerate(steps):
            now += step
            values[now] = float(number * number)
            history.add(now, {"loss": values[now]})
    intervals = {}
    for time, value in values.items():
        intervals.setdefault(time // history.interval_s, []).append(value)
    expected = [(index * history.interval_s, sum(part) / len(part)) for index, part in intervals.items()]
    assert history.points("loss") == expected
    assert len(expected) <= most
    if history.interval_s > 1:
        assert len({time // (history.interval_s // 2) for time in values}) > most, (
            "the interval is the least one"
        )


def test_history_of_a_month_is_small():
    history = History()
    for second in range(0, 30 * DAY, 61):
        history.add(
            1.8e9 + second, {"loss": 1 / 3, "val_loss": 2 / 3, "steps/s": 1e4 / 7, "closures/s": 1 / 7}
        )
    assert all(MOST_POINTS / 2 <= len(history.points(name)) <= MOST_POINTS for name in ("loss", "steps/s"))
    assert len(history.to_text()) < MOST_BYTES / 2
    assert len(history.points("loss", 100)) <= 100


@pytest.mark.parametrize("value", [None, "nan", float("nan"), float("inf"), "-inf", -1.7e308], ids=str)
def test_values_that_are_no_numbers_leave_a_gap(value):
    history = filled(20, loss=lambda second: value if second in range(5, 15) else 1.0)
    assert [time for time, _ in history.points("loss")] == [*range(5), *range(15, 20)]


def test_clock_that_is_set_back_adds_to_the_newest_point():
    history = History()
    history.add(100.0, {"loss": 1.0})
    history.add(50.0, {"loss": 2.0})
    assert history.points("loss") == [(100, 1.5)]


def test_there_are_few_curves():
    history = History()
    history.add(0.0, {str(number): 1.0 for number in range(100)})
    assert [bool(history.points(str(number))) for number in range(100)] == [True] * MOST_CURVES + [False] * (
        100 - MOST_CURVES
    )


# --- over a restart ---------------------------------------------------------------------------------------


def test_curve_goes_on_after_a_restart(tmp_path):
    file = HistoryFile(str(tmp_path / "history.json"))
    before = file.load()
    before.add(100.0, {"loss": 2.0, "steps/s": 9.5})
    file.save(before)
    after = file.load()
    after.add(130.0, {"loss": 1.0})
    assert after.points("loss") == [(100, 2.0), (130, 1.0)]
    assert after.points("steps/s") == [(100, 9.5)]
    assert [path.name for path in tmp_path.iterdir()] == ["history.json"]


def test_thinned_curve_goes_on_after_a_restart():
    before = filled(3 * MOST_POINTS, loss=float)
    after = History.from_text(before.to_text())
    for history in (before, after):
        history.add(3 * MOST_POINTS, {"loss": 1.0})
    assert after.points("loss") == before.points("loss")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"interval_s": 0, "curves": {}}',
        '{"interval_s": 1, "curves": {"loss": [[1, NaN, 1]]}}',
        '{"interval_s": 1, "curves": {"loss": [[1, 1.0, 0]]}}',
        '{"interval_s": 1, "curves": {"loss": [[1, 1.0]]}}',
        json.dumps({"interval_s": 1, "curves": {"loss": [[n, 1.0, 1] for n in range(MOST_POINTS + 1)]}}),
        " " * (MOST_BYTES + 1),
    ],
    ids=lambda text: text[:40],
)
def test_file_of_another_program_is_no_error_of_the_job(tmp_path, caplog, text):
    path = tmp_path / "history.json"
    path.write_text(text)
    with pytest.raises(TextError):
        History.from_text(text)
    assert HistoryFile(str(path)).load().points("loss") == []
    assert f"The curves of the status start again, because {path} cannot be read" in caplog.text


def test_history_without_a_file_or_folder_is_not_kept(tmp_path, caplog):
    for file in (HistoryFile(None), HistoryFile.from_environment({"REPLICAX_STATUS_HISTORY": ""})):
        file.save(History())
        assert file.load().points("loss") == []
    HistoryFile(str(tmp_path / "none" / "history.json")).save(History())
    assert not caplog.records


# --- pictures ---------------------------------------------------------------------------------------------


def lines_of(picture):
    """The class and the points of each line."""
    root = ET.fromstring(picture)
    found = [each for each in root.iter() if each.tag.endswith("polyline")]
    return [
        (each.get("class"), [tuple(map(float, at.split(","))) for at in each.get("points").split()])
        for each in found
    ]


def texts_of(picture):
    return [each.text for each in ET.fromstring(picture).iter() if each.tag.endswith("text")]


def test_loss_and_speed_have_a_picture_each():
    history = filled(100, loss=lambda s: 3 - s / 100, val_loss=lambda s: 3.0, **{"steps/s": lambda s: 50.0})
    losses, speeds = pictures(history, 100.0)
    assert [name for name, _ in lines_of(losses)] == ["curve loss", "curve val_loss"]
    assert [name for name, _ in lines_of(speeds)] == ["curve steps"]
    ((_, points), _) = lines_of(losses)
    assert len(points) == 100
    lefts, tops = zip(*points, strict=True)
    assert list(lefts) == sorted(lefts)
    assert list(tops) == sorted(tops), "the loss falls"
    assert {"100 s ago", "50 s ago", "now", "loss", "val_loss"} <= set(texts_of(losses))
    assert {"0.0", "steps/s"} <= set(texts_of(speeds))


def test_loss_over_orders_of_magnitude_is_logarithmic():
    (picture,) = pictures(filled(100, loss=lambda s: 0.9**s), 100.0)
    assert "logarithmic" in texts_of(picture)
    ((_, points),) = lines_of(picture)
    falls = {round(later[1] - earlier[1], 0) for earlier, later in itertools.pairwise(points)}
    assert falls <= {1.0, 2.0}, "it is straight"


@pytest.mark.parametrize("value", [0.0, -1.5, 1e-300, 1e300], ids=str)
def test_constant_curve_lies_within_its_picture(value):
    (picture,) = pictures(filled(10, loss=lambda s: value), 10.0)
    ((_, points),) = lines_of(picture)
    assert all(0 <= left <= 480 and 0 <= top <= 190 for left, top in points)


@pytest.mark.parametrize("other", [-1e300, -1.0, 0.0, 5e-324, 1.0], ids=str)
def test_curve_of_the_largest_and_the_smallest_numbers_has_points_and_texts_of_finite_numbers(other):
    history = filled(4000, loss=lambda s: (1e300, other)[s // 2000])
    assert History.from_text(history.to_text()).points("loss") == history.points("loss")
    (picture,) = pictures(history, 4000.0)
    ((_, points),) = lines_of(picture)
    assert all(0 <= left <= 480 and 0 <= top <= 190 for left, top in points)
    assert not {"nan", "inf", "-inf"} & set(texts_of(picture))


def test_line_is_broken_where_nothing_was_known():
    history = filled(30, loss=lambda s: None if s in range(10, 20) else 1.0)
    (picture,) = pictures(history, 30.0)
    assert [len(points) for _, points in lines_of(picture)] == [10, 10]


def test_single_point_is_a_dot():
    (picture,) = pictures(filled(1, loss=float), 1.0)
    ((_, points),) = lines_of(picture)
    assert len(points) == 2
    assert points[0] == points[1]


def test_pictures_have_few_bytes_however_long_the_job_runs():
    curves = dict.fromkeys(("loss", "val_loss", "steps/s"), lambda s: 100 + s % 97 / 7)
    for num in (5, 4000):
        drawn = pictures(filled(num, 10**9, **curves), 10.0**9 + num)
        assert all(len(points) <= MOST_DRAWN for picture in drawn for _, points in lines_of(picture))
        assert len("".join(drawn)) < 20_000
    assert pictures(History(), 0.0) == []


def test_picture_has_no_text_of_others():
    history = History()
    history.add(0.0, {"<script>": 1.0, "loss": 1.0})
    assert re.findall("script", "".join(pictures(history, 1.0))) == []

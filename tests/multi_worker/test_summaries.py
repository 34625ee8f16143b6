"""Summaries in real processes: one of them writes. Each process writes its own trace."""

import numpy as np
import pytest

import trace_files
from event_files import files_in, scalars_in, summaries_in
from programs import summaries

pytestmark = [pytest.mark.timeout(180), pytest.mark.rest]


@pytest.mark.parametrize("chief", [False, pytest.param(True, marks=pytest.mark.long)])
def test_chief_of_two_processes_writes(reports_of, tmp_path, chief):
    first, second = reports_of(summaries, str(tmp_path), workers=1 if chief else 2, chief=chief)
    assert first == {"refused": True, "is_writing": [True, True]}
    assert second == {"refused": True, "is_writing": [False, False]}
    assert (
        len(files_in(tmp_path / "run")) == len(files_in(tmp_path / "early")) == 1
    )  # also of who did not close it
    assert scalars_in(tmp_path / "run") == {
        "loss": dict.fromkeys(range(3), 2.5),
        "total": {0: 4.0, 1: 8.0, 2: 12.0},
    }
    assert scalars_in(tmp_path / "early") == {"loss": dict.fromkeys(range(3), 1.0)}
    tables = [value for plugin, *_, value in summaries_in(tmp_path / "run") if plugin == "histograms"]
    assert [table[:, 2].sum() for table in tables] == [4, 4, 4]
    for number, path in enumerate(trace_files.files_in(tmp_path / "trace")):
        assert (tmp_path / "trace" / f"worker_{number}") in path.parents or chief
        events = dict(trace_files.events_in(path))
        assert events[f"replica {number}"]["device_ordinal"] == 0
        assert any("step_num" in stats for stats in events.values())
    assert number == 1
    np.testing.assert_allclose(tables[0][[0, -1], [0, 1]], [0, 3])

"""Accumulated gradients over several processes."""

import pytest

from checks import assert_close
from programs import accumulates, accumulates_in_fit

pytestmark = pytest.mark.timeout(240)


@pytest.mark.rest
@pytest.mark.parametrize("devices", [pytest.param(1, marks=pytest.mark.long), 2])
def test_micro_batches_of_two_processes_equal_one_large_batch(reports_of, devices):
    for report in reports_of(accumulates, workers=2, devices=devices):
        assert_close(report["losses"], report["expected"], 1e-5)
        assert_close(report["weight"], report["params"], 1e-5)


@pytest.mark.rest
def test_fit_of_two_processes_and_its_checkpoint_in_one_equal_large_batches(reports_of, tmp_path):
    two = reports_of(accumulates_in_fit, str(tmp_path), workers=2)
    (alone,) = reports_of(accumulates_in_fit, str(tmp_path), workers=1)
    for report in (*two, alone):
        loaded = ("Sequential_loaded", "OwnStep_loaded") if report is alone else ()
        for style in ("Sequential", "OwnStep", *loaded):
            for got, expected in zip(report[style], alone["large"], strict=True):
                assert_close(got, expected, 1e-5)

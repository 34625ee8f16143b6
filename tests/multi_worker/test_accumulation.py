"""``rx.experimental.accumulate`` over several processes."""

import pytest
from programs import accumulates

from checks import assert_close

pytestmark = pytest.mark.timeout(240)


@pytest.mark.rest
@pytest.mark.parametrize("devices", [1, 2])
def test_micro_batches_of_two_processes_equal_one_large_batch(reports_of, devices):
    for report in reports_of(accumulates, workers=2, devices=devices):
        assert_close(report["losses"], report["expected"], 1e-5)
        assert_close(report["weight"], report["params"], 1e-5)

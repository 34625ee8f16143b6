"""``TPUStrategy`` on several hosts, as virtual devices of several processes, equals one process."""

import numpy as np
import pytest

from programs import on_hosts_of_a_tpu

pytestmark = pytest.mark.timeout(180)


@pytest.mark.rest
def test_two_hosts_are_one_tpu(reports_of):
    hosts = reports_of(on_hosts_of_a_tpu, workers=2, devices=4)
    (alone,) = reports_of(on_hosts_of_a_tpu, workers=1, devices=8)
    assert alone["here"] == [0] * 4
    for number, host in enumerate(hosts):
        assert host["mesh"] == alone["mesh"] == [2, 1, 2, 2]
        assert host["num_replicas"] == alone["num_replicas"] == 4
        assert host["here"] == [number] * 2
        assert host["checkpoint"] == (number == 0)
        assert host["shards"] == alone["shards"] == [[6, 4]]
        assert host["kernel"] == alone["kernel"] == [[6, 4]]
        for name in ("losses", "w1", "w2", "fit"):
            np.testing.assert_allclose(host[name], alone[name], rtol=1e-5, atol=1e-6)

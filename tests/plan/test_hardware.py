"""Names of hardware: what exists, and what those who ask for something else are told."""

import pytest

from replicax import errors
from replicax._src.plan import hardware
from replicax._src.plan.hardware import chips, hardware_of


@pytest.mark.parametrize(
    ("name", "num_devices", "num_hosts"),
    [
        ("v5e:4x8", 32, 1),
        ("v5p:16x16x16", 4096, 1),
        ("v5p:4x4x12", 192, 1),
        ("h100:16x8", 128, 16),
        ("h200:4", 4, 1),
        ("a100=1x1", 1, 1),
        ("cpu:8", 8, 1),
    ],
)
def test_names(name, num_devices, num_hosts):
    found = hardware_of(name)
    assert (found.num_devices, found.num_hosts) == (num_devices, num_hosts)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v5e:4x9", "v5e:8x16"),
        ("v5p:16x16x17", "v5p:16x16x16"),
        ("v5p:24x24x24", "up to 6144 chips"),
        ("v5p:12x4x4", "v5p:4x4x8"),
        ("h100:16x9", "at most 8"),
        ("h100:2x2x2", "at most 8"),
        ("v5litepod-16", "v5e:16x16"),
        ("tpu:8", "nothing is known of 'tpu'"),
        ("h100:0x8", "no devices"),
        ("cpu:2x4", "cpu:8"),
        ("cpu:4096", "2048"),
        (8, "h100:16x8"),
    ],
)
def test_what_does_not_exist(name, told):
    with pytest.raises(errors.TopologyError) as caught:
        hardware_of(name)
    assert told in str(caught.value)


def test_every_fact_has_its_source():
    for chip in chips().values():
        assert chip.source.startswith("https://"), chip.key
        assert chip.kind == "tpu" or chip.host_source.startswith("https://"), chip.key
        assert min(chip.memory_bytes_per_s, chip.link_bytes_per_s, *chip.flops_per_s.values()) > 1e11, (
            chip.key
        )
        assert (chip.kind == "tpu") == bool(chip.topologies)


def test_dtypes_that_are_not_published_count_as_those_that_are():
    h100, v5e = chips()["h100"], chips()["v5e"]
    assert h100.flops_of("int8") == h100.flops_of("float32") < h100.flops_of("bfloat16")
    assert v5e.flops_of("float32") == v5e.flops_of("bfloat16")


def test_virtual_devices_share_the_memory_of_the_machine():
    assert hardware_of("cpu:8").chip.memory_bytes == hardware._memory_of_machine() // 8

"""Names of hardware: the existing ones, and the errors for others."""

import pytest

from replicax import errors
from replicax._src.devices import hardware
from replicax._src.devices.hardware import chips, hardware_of


@pytest.mark.parametrize(
    ("name", "num_devices", "num_domains"),
    [
        ("v5e:4x8", 32, 1),
        ("v5p:16x16x16", 4096, 1),
        ("v5p:4x4x12", 192, 1),
        ("h100:16x8", 128, 16),
        ("h200:4", 4, 1),
        ("a100=1x1", 1, 1),
        ("cpu:8", 8, 1),
        ("v4:2x2x4", 16, 1),
        ("tpu7x:2x2x1", 8, 1),
        ("2xv5e:16x16", 512, 2),
        ("4xtpu7x:4x4x4", 512, 4),
    ],
)
def test_names(name, num_devices, num_domains):
    found = hardware_of(name)
    assert (found.num_devices, found.num_domains) == (num_devices, num_domains)
    assert found.domain_size * num_domains == num_devices


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("v5litepod-16", "v5e:4x4"),
        ("v5e-256", "v5e:16x16"),
        ("v6e-256", "v6e:16x16"),
        ("v4-32", "v4:2x2x4"),
        ("v5p-128", "v5p:4x4x4"),
        ("v5p-8", "v5p:2x2x1"),
        ("tpu7x-128", "tpu7x:4x4x4"),
        ("2xv5litepod-256", "2xv5e:16x16"),
        ("h200:4", "h200:1x4"),
    ],
)
def test_names_of_vendors(name, ours):
    assert hardware_of(name) == hardware_of(ours)
    assert hardware_of(name).name == ours


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("v5e:4x9", "v5e:8x16"),
        ("v5p:16x16x17", "v5p:16x16x16"),
        ("v5p:24x24x24", "up to 6144 chips"),
        ("v5p:12x4x4", "v5p:4x4x8"),
        ("h100:16x9", "at most 8"),
        ("h100:2x2x2", "at most 8"),
        ("v5litepod-17", "v5litepod-16"),
        ("v5p-136", "v5p-128"),
        ("v9-8", "v5litepod-16"),
        ("0xv5e:4x4", "2xv5e:16x16"),
        ("2xh100:1x8", "only TPUs come in slices"),
        ("2xcpu:8", "only TPUs come in slices"),
        ("tpu:8", "no facts about 'tpu'"),
        ("h100:0x8", "no devices"),
        ("cpu:2x4", "cpu:8"),
        ("cpu:4096", "2048"),
        (8, "h100:16x8"),
    ],
)
def test_unknown_hardware(name, told):
    with pytest.raises(errors.TopologyError) as caught:
        hardware_of(name)
    assert told in str(caught.value)


FACTS = ["flops_per_s", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s", "network_bytes_per_s"]


def test_every_fact_has_its_source():
    for chip in chips().values():
        facts = [fact for fact in [*FACTS, "topologies", "per_host", "compiler"] if getattr(chip, fact)]
        assert [fact for fact in facts if not chip.source_of(fact).startswith("https://")] == [], chip.key
        assert {fact for found in chip.sources.values() for fact in found} <= set(facts), chip.key
        assert min(chip.memory_bytes_per_s, chip.link_bytes_per_s, *chip.flops_per_s.values()) > 1e11, (
            chip.key
        )
        assert (chip.kind == "tpu") == bool(chip.topologies)
        assert chip.network_bytes_per_s < chip.link_bytes_per_s < chip.memory_bytes_per_s


def test_a_chip_of_two_devices_is_shared_by_them():
    chip = chips()["tpu7x"]
    assert chip.flops_of("bfloat16") == 2307e12 / 2
    assert chip.memory_bytes == 96 << 30


def test_gpus_have_the_peak_that_their_units_have():
    """XLA's target configs have 4 matrix units for each of the cores, of 512 multiplications of bfloat16 at 1.83 GHz on H100."""
    cores = (chips()["h100"].compiler or {})["core_count"]
    assert chips()["h100"].flops_of("bfloat16") == pytest.approx(cores * 4 * 512 * 2 * 1.8295e9, rel=1e-3)
    cores = (chips()["b200"].compiler or {})["core_count"]
    assert chips()["b200"].flops_of("bfloat16") == pytest.approx(cores * 4 * 1024 * 2 * 1.8353e9, rel=2e-2)


def test_dtypes_that_are_not_published_count_as_those_that_are():
    h100, v5e = chips()["h100"], chips()["v5e"]
    assert h100.flops_of("int8") == h100.flops_of("float32") < h100.flops_of("bfloat16")
    assert v5e.flops_of("float32") == v5e.flops_of("bfloat16")


def test_virtual_devices_share_the_memory_of_the_machine():
    assert hardware_of("cpu:8").chip.memory_bytes == hardware._memory_of_machine() // 8

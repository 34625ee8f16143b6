"""The error for a missing optional package: the packages to install, and the extra of replicax."""

import sys

import pytest

import replicax as rx
from checks import in_a_process_of_its_own, message
from replicax._src.packaging.extras import EXTRAS, Package, missing_extra, missing_packages


def test_the_packages_to_install_come_first():
    nothing = Package("no-such-package", "no_such_package")
    assert not nothing.is_installed
    assert nothing.version is None
    error = missing_extra("This", "plan-tpu", advice="That needs nothing.")
    assert str(error) == (
        "This needs libtpu, which is not installed. Run: pip install libtpu (the extra plan-tpu). "
        "That needs nothing."
    )


def test_only_missing_packages_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "xxhash", None)
    assert [package.name for package in missing_packages("ps")] == ["xxhash"]
    assert "pip install xxhash (the extra ps)" in str(missing_extra("This", "ps"))
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    text = str(missing_extra("This", "ps"))
    assert text.startswith(
        "This needs xxhash and cloudpickle, which are not installed. Run: pip install xxhash cloudpickle"
    )
    assert "xxhash" not in str(missing_extra("This", "ps", "cloudpickle"))


def test_damaged_package_is_reinstalled():
    assert str(missing_extra("This", "optax")).startswith(
        "This needs optax, which cannot be imported. Run: pip install optax"
    )


def test_a_plugin_of_jax_has_its_version(monkeypatch):
    import jax

    (plugin,) = EXTRAS["plan-gpu"]
    assert plugin.to_install == f"jax-cuda12-plugin=={jax.__version__}"


@pytest.mark.parametrize("kind", ["tpu", "gpu"])
def test_a_plan_asks_for_its_compiler(monkeypatch, kind):
    from replicax._src.devices.hardware import check_extra, hardware_of

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    hardware = hardware_of({"tpu": "v5e:2x4", "gpu": "h100:1x8"}[kind])
    says = ["needs " + EXTRAS[f"plan-{kind}"][0].name, "Run: pip install ", f"the extra plan-{kind}", "cpu:8"]
    message(rx.errors.MissingExtraError, lambda: check_extra(hardware), *says)
    check_extra(hardware_of("cpu:8"))


# The first use of each, without its packages.
USES = {
    "rx.optax.aggregate_gradients()": ("optax", "optax"),
    "rx.SummaryWriter('/tmp/none')": ("tensorboardX", "summaries"),
    "rx.Checkpoint(a=rx.Variable(1.0)).save('/tmp/none/c')": ("tensorstore", "checkpoint"),
    "rx.data.from_csv('/tmp/none')": ("pyarrow", "files"),
    "rx.data.from_tfrecords('/tmp/none')": ("grain", "files"),
    "rx.keras.callbacks.CheckpointCallback": ("keras", "keras"),
}


@pytest.mark.rest
def test_each_use_names_its_package_first():
    program = f"""
    import sys
    for name in ("optax", "tensorboardX", "tensorstore", "pyarrow", "grain", "keras"):
        sys.modules[name] = None
    import replicax as rx
    for use in {list(USES)!r}:
        try:
            eval(use)
        except rx.errors.MissingExtraError as error:
            print(error)
    """
    lines = in_a_process_of_its_own(program, "-W", "error").splitlines()
    for line, (use, (packages, extra)) in zip(lines, USES.items(), strict=True):
        assert f"needs {packages}, which" in line, use
        assert f"Run: pip install {packages.replace(' and', '')} (the extra {extra})" in line, use

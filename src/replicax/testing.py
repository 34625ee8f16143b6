"""Checks of your own programs, for tests and notebooks: ``rx.testing``."""

from replicax._src.testing.check import check_against_one_device
from replicax._src.testing.report import Difference, OneDeviceReport

__all__ = ["Difference", "OneDeviceReport", "check_against_one_device"]

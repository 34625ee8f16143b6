"""Settings of this process: ``rx.config``."""

from replicax._src.topology import set_local_devices

__all__ = ["set_local_devices"]

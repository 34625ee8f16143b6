# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._launch.ray.server_actors import parameter_servers as parameter_servers
from replicax._launch.ray.training import ReplicaxConfig as ReplicaxConfig
from replicax._launch.ray.training import fit as fit
from replicax._launch.ray.training import report as report

__all__ = [
    'ReplicaxConfig',
    'fit',
    'parameter_servers',
    'report',
]

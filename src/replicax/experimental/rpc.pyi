# Written by tools/public_stubs.py from the module and src/replicax/_src/parts.py. Do not edit.

from replicax._ps.transport.rpc import Client as Client
from replicax._ps.transport.rpc import Server as Server
from replicax._ps.transport.rpc import StatusOrResult as StatusOrResult

__all__ = [
    'Client',
    'Server',
    'StatusOrResult',
]

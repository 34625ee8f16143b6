"""The rules of the controller of the control channel, and of its members: pure machines."""

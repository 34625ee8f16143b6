"""The training thread of a process that goes on after the death of others."""

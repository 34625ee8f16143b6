"""Frames on sockets between the processes of a job: connections, authentication, limits."""

"""The job of a coordinator as a pure machine: events in, actions out. No sockets, threads, clocks, locks or futures.

The coordinator does not run it yet.
"""

"""The job of a coordinator as a pure machine: events in, actions out. No sockets, threads, clocks, locks or futures.

``_ps/coordinator/job_loop.py`` runs it.
"""

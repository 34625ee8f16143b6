"""The process that schedules functions: ``ClusterCoordinator``, and the loop that runs its job (``_ps/job``)."""

"""The part of parameter-server training that runs on workers: functions, their inputs and their pulls."""

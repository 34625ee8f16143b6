"""The client of parameter servers, which coordinators and workers use."""

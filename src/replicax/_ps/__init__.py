"""Training with workers and parameter servers. docs/explanation/parameter_servers.md explains it."""

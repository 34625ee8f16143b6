"""One task of a cluster: its server, its session, its work for a coordinator, and the setup of its process."""

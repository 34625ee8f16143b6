"""Ray: synchronous strategies in Ray Train, parameter servers on a placement group."""

"""Parameter servers: the tasks, what travels between them, and what each of them does."""

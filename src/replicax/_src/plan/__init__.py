"""Plans: published facts of hardware, what a program asks for and costs, and the report of it."""

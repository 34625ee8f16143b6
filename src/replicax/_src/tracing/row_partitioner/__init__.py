"""From a program over a whole batch to one that each replica runs on its rows of it."""

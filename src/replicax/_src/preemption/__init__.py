"""What a program does when its machine is taken away: all its tasks save after the same step, and end."""

"""What a worker does with the functions that it is sent."""

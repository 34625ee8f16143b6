"""Messages about the user's code: errors and warnings that name the line and what to write. It listens to traces."""

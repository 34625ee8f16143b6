"""What coordinators and workers say to parameter servers."""

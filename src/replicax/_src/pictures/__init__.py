"""What people look at: tables for notebooks, pictures of where values lie."""

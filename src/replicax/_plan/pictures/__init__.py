"""Views for people: tables for notebooks, and pictures of the placement of values."""

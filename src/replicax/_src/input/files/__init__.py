"""Datasets over files."""

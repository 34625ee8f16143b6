"""Scheduled functions as programs: traced, split between workers and parameter servers, and exported."""

"""Scheduled functions as programs: traced, cut between workers and parameter servers, exported."""

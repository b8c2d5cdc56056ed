"""Searches: schedules and slices that are found rather than written down."""

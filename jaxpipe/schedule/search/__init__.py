"""Searches: schedules that are found rather than written down."""

"""Schedules from outside: CSV, JSON, and users' functions."""

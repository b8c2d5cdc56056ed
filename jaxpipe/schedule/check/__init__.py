"""Checks that prove whether a schedule can run."""

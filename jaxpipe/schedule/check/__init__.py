"""Checks: what makes a schedule one that can run."""

"""Measurements of a run: metrics, time by cause, profiles, gradient noise."""

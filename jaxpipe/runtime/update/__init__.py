"""Optimizers on placed parameters, and updates within the step."""

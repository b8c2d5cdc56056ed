"""The executor: what runs in a tick."""

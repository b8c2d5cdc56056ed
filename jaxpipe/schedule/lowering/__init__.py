"""Lowering: from a schedule to the table of ticks that the executor runs."""

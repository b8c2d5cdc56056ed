"""Measurements of a program: memory, time per layer, its HLO, and the flags of its compiler."""

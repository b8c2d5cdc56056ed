"""Generators: one file per schedule family, and what several of them are built on."""

"""Layouts of arrays: parameters, slots, and their parts on data shards."""

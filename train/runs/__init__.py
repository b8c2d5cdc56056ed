"""The folder of a run: what it holds, who may write to it, and where else it lies."""

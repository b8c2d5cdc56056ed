"""Updates within the step, and asynchronous training."""

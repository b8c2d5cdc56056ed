"""Pictures, reports and comparisons of schedules."""

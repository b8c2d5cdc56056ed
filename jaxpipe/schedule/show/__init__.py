"""Pictures of schedules: text, SVG, a page for browsers, a trace."""

"""Metrics, logs and debug surfaces: they look at the core and never change a decision."""

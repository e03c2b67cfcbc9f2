"""Filters, scorers, pickers and deciders: pure policy, under the reference's type names."""

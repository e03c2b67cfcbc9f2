"""Commands for people who run a picker: they ask a running one, or read what it wrote."""

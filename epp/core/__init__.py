"""The core decides. Pure and synchronous: no I/O, clock, logging or global randomness here."""

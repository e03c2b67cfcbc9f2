"""`kvpull calibrate`: recompute against pull, measured on a pair of engines."""

"""The demo scenario: twelve rows that show when a prefix is pulled, and when nothing may move.

Each module holds a group of rows. A row sets its preconditions up by conditions on the debug surfaces
(never by waiting some time), asks through the gateway as a client would, and reaches its verdict on
tokens, bytes and reasons.
"""

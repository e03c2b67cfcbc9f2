"""Requests at random: every field that decides about tokens, in the forms that clients and tests send.

Pure functions of a seed. Most of a request is plain, so that the engine answers it; something in it is odd: a
null, an empty list, a special token in a text, a key too many, the wrong type. What the engine refuses proves
nothing; what it answers the router has to know, or to leave alone (tests/engine/test_random_parity.py).
"""

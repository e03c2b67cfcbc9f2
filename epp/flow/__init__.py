"""Lets requests wait until the pool has room for them (`controller`), or sheds the least important.

Shell: futures and a tick around the pure queue of `epp/core/flow`.
"""

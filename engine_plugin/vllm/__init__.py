"""The adapter for a real vLLM: the only package here that imports vLLM, `compat` the only module that
knows its versions. Importing this package imports nothing: it is loaded in three processes of an engine.
"""

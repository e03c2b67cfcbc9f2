"""InferenceObjective and InferenceModelRewrite: priorities and model names, from the cluster.

Shell: watches both kinds and keeps plain values; what is absent or unreadable changes nothing.
"""

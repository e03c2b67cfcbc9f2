"""What several replicas of the picker agree on by Leases: who serves, or how many they are.

Shell: it writes and reads `coordination.k8s.io` Leases and tells a leader flag (`elector`) or a share of
the limits (`roster`): two ways to run several replicas, and one value that chooses (`choice`).
"""

"""The routing sidecar: one reverse proxy beside every engine rank."""

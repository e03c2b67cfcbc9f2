"""Builds both images where no Docker and no registry is, starts and asks them: `python -m deploy.image`."""

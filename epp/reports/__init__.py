"""What engines report of pulls that have ended (`PullFinished`)."""

"""PullThresholds documents: the part of the pull decision that operators change at run time."""

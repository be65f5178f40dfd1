"""Adam-mini's blocks, which share a second moment, for each leaf of a tree."""

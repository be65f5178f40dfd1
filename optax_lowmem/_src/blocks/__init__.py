"""Adam-mini's blocks of shared second moments: the structure of a tree."""

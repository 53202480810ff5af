"""BatchNorm in a step that runs in micro-batches, and what may stand in its place."""

"""One optimizer step over micro-batches that equals the step of the one big batch."""

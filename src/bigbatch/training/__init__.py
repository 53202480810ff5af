"""A run: task, loop, log, evaluation."""

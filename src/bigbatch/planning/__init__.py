"""From what a model costs to a plan: pure search, without torch."""

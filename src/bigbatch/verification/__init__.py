"""Against the true big batch: whether a cut gives its gradient, and if not, why."""

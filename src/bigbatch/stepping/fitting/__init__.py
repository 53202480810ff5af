"""From a memory budget to a plan: the model is traced, timed and tried, and the search of ``planning`` chooses."""

"""Losses of the whole batch, which look across samples."""

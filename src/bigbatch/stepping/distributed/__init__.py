"""A step that several ranks make together."""

"""Dropout whose masks belong to the samples."""

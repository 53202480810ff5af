"""Built-in tasks on real data that comes with packages."""

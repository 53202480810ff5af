"""How good the plans are: predicted against measured."""

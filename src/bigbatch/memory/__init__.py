"""What costs memory: measure it, recompute modules instead of keeping what they saved."""

"""Saved activations on the way to host memory and back."""

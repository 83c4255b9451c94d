"""Offloading: copies saved activations to host memory and back."""

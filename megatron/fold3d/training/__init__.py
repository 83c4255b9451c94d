"""Launcher, recipes and measuring; the only room that imports megatron.training."""

"""TRAINING: launcher, recipes, measuring; the only room that imports megatron.training."""

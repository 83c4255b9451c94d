"""From a model's shape and a cluster to the costs of each action."""

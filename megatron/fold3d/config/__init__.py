"""Our flags: the arguments of each feature, their rules, and one frozen configuration."""

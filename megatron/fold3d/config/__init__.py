"""OUR FLAGS: the arguments of each feature, their rules, and one frozen configuration."""

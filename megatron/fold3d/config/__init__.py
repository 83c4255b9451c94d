"""OUR FLAGS: what each feature takes, checks and refuses, and one frozen configuration."""

"""The sub-commands of `fold3d`, one file each: its help text, its options, and its run."""

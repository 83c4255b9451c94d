"""The sub-commands of `fold3d`, a file each: what it says about itself, its options, its run."""

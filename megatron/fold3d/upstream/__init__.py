"""The versions of Megatron-core and torch that we run with, and what differs between them."""

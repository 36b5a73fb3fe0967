"""Dynamic context parallelism of Megatron-Core."""

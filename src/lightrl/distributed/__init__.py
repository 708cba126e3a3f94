"""Process groups, meshes, FSDP2."""

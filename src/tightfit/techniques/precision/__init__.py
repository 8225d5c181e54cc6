"""Computing and training in bfloat16."""

"""The processes that run a workload: one traces it on the virtual GPU, one runs its first steps on the host with real numbers."""

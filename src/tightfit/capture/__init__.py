"""The one place that traces: runs a workload on the virtual GPU and returns its tape."""

"""The search for a plan: options solved for, traced again, corrected, among variants of the workload."""

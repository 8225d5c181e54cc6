"""The machine as metrics, for Prometheus and whatever reads OpenMetrics."""

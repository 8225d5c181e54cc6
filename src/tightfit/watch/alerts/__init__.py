"""Alerts: rules about the machine, the episodes in which they hold, and where these are told."""

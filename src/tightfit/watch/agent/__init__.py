"""The one reader of a machine: asks the source, keeps what it says, forecasts, alerts."""

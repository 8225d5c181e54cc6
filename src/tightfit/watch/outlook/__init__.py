"""What the next hour needs: forecasts of cards and processes within a budget of processor time, and whether one more job fits."""

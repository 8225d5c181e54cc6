"""What the next samples of a memory series will need at most: series in, quantiles out. No torch.

`forecasts.forecast_series` is the whole of it: models (`models/`) forecast the maximum of the next samples at many past moments, a tournament picks the
one whose bounds were best, and its level is corrected by how often they were exceeded.
"""

"""What the kernels of a card refuse of their arguments, in their own words: dtypes that they lack, dtypes that do not go together, devices."""

"""The state of a machine at a time: readings of its cards and processes, and what is forecast and alerted from them."""

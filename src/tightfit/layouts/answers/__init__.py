"""What a search for layouts answers: the plan, what it costs, and the curve over several numbers of cards."""

"""What layouts cost, and the curve over several numbers of cards."""

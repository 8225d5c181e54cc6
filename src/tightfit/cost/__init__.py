"""Seconds of operators, copies and collectives: a roofline with measured efficiencies."""

"""Layouts over many cards: one traced step of one card in, the fastest layout that fits out, by arithmetic alone."""

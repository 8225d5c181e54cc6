"""Chooses options under budgets. Sees numbers only, never a technique."""

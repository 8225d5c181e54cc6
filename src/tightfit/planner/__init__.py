"""The planner: chooses options under budgets with an exact solver. It sees numbers only, never a technique."""

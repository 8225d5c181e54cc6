"""The quality of plans: budgets from the plain peak down to the lowest reachable one, against simple baselines, the optimum and published figures."""

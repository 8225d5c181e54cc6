"""What plans are worth: budgets from roomy to the least that can be held, against simple baselines, the optimum, and published figures."""

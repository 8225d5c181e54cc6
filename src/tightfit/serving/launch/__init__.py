"""A server's settings as the arguments of the engines' own commands, and as a Kubernetes manifest."""

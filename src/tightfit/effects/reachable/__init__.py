"""The state that a forward can reach from its modules and through its code, object by object."""

"""How an optimizer is stepped: for one parameter, with another kernel, in the backward pass."""

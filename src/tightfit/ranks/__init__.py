"""`tightfit run --gpus N`: every rank runs the same program; the forward and the backward pass of a step are divided over them."""

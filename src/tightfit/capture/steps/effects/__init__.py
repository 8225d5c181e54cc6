"""Side effects of a program on the virtual GPU: state that its modules write, and accesses to its gradients."""

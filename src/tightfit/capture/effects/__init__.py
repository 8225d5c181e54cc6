"""What a program does on the virtual GPU besides computing: what its modules write, and who else touches its gradients."""

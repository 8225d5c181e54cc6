"""Hugging Face configs as workloads: the model, its inputs and its task."""

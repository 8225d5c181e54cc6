"""What is traced: scripts, generator functions and Hugging Face configs, as a user names them, and how each is run."""

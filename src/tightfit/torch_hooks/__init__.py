"""The only place that replaces names of torch, or of another library, inside a user's process; `manifest` lists them."""

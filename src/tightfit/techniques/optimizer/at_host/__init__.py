"""States of an optimizer in host memory or on disk, and updates on the host itself."""

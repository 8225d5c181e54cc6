"""Reports: plain data in, text, pages and files out; one module per output. Never given live objects."""

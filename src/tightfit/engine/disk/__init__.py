"""Storages in files on a disk: where the files are, the slabs in them, and the copies to and from them."""

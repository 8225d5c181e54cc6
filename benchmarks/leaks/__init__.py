"""Scripted leaks and clean look-alikes, and what `tightfit.leaks` and `tightfit doctor` say of each."""

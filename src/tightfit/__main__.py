"""`python -m tightfit` is the program `tightfit`."""

from tightfit.cli.main import main

main()

"""The machine's figures for the tools that training runs are followed with."""

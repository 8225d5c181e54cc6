"""Guards the training loops of an unmodified script: finds them in its source, and runs each turn so that it can be taken back and run again."""

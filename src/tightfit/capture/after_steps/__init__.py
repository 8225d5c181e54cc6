"""What a trace does after the steps asked for: it leaves training loops, goes on to what comes later, and says what it has not reached."""

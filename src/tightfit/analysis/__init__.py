"""What a tape shows of the program: its modules, optimizer, loss head and attention, as numbers, for techniques to make options of."""

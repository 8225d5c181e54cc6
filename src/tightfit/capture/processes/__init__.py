"""Child processes: they start fast, never outlive their parent, and are contained: what a traced program asks of the machine does not leave them."""

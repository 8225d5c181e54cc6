"""Analysis of a tape without torch: module calls, optimizer, loss head and attention, as numbers from which techniques derive options."""

"""Several models trained on the same text with the same budget, and a report that says what may be concluded."""

"""Which model a text and so many minutes are best spent on, and the bits per byte to expect of it."""

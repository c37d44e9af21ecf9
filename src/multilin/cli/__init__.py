"""The command line: the only part of multilin that prints."""

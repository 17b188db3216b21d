"""The command line: one function for each command, what they share, and how they end."""

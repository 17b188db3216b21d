"""Parameters from elsewhere: other sizes, other heads, other people's files."""

"""The door: every byte of a stranger's image passes through this folder."""

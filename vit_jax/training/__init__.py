"""What is trained, one step, and the loop around it."""

"""Learning from pairs of images and texts: the objective, and a file for each loss."""

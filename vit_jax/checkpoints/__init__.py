"""A run's own checkpoints: reading and writing them. Other people's formats are in `interchange`."""

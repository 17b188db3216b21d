"""A weighted sum of objectives over one model."""

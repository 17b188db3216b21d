"""What `vit_jax benchmark` measures, with the context that gives its figures a meaning."""

"""The engines of `vit_jax launch`, a module each; `launch.main` says what one has."""

"""Model families and their building blocks; they know nothing of data, optimizers or meshes."""

"""One file per family, loaded by name; published oddities of the ViT."""

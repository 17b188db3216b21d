"""What devices do to batches of images: from uint8 pixels to what the model sees."""

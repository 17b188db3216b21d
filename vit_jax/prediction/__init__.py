"""A trained model on images of a user: which images, what may be changed for them, classes, features, a picture."""

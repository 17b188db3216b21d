"""Accuracy and other measures of a trained model."""

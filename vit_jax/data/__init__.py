"""Images on their way to the model: how they are found, read, cut and ordered, and how devices
change them.
"""

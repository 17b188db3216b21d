"""Other people's names and layouts of the parameters of our models. Files are none of its business:
formats, which know them, are in `interchange`.
"""

"""Other people's names and layouts of the parameters of our models. Nothing here knows about files:
the formats, which do, are in `interchange`.
"""

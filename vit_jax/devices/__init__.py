"""The devices of a run: how arrays lie on them, how several processes work as one, and what
accelerators can do.
"""

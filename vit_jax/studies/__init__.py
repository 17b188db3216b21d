"""How runs compare: what was varied, what came of it, as tables, curves and a page. It reads what runs
have written, and trains nothing.
"""

"""What a model has learned: quantities that are functions of arrays, pictures of them, and a page.
Nothing here trains or judges.
"""

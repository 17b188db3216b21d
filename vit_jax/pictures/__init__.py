"""Pictures of numbers, for people: axes with curves and dots, tiles of maps and images, pages. They
know arrays and texts, and nothing of models, runs or images' meaning. Drawn by matplotlib, which is imported
when the first one is drawn.
"""

"""What everything else stands on: errors, options, names and patterns, durations, places. Nothing
here knows of models, data or devices.
"""

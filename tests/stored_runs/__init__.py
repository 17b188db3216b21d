"""Runs that earlier versions left unfinished, which every later version must resume: see README.md."""

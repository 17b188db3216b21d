"""A small HTTP server for one model: what it computes (`network`), how images that arrive one by one are
computed together (`batching`), what is asked and answered (`server`), and the command (`run`).
"""

"""Servers that tests run against, each a process of its own on loopback: Cloud Storage, S3, and in
front of both a proxy that counts requests and injects faults. The fixtures are in `buckets`.
"""

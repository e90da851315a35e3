"""The contract between export and server: what a bundle contains and how its tensors are named.

Imports nothing but the standard library and numpy, so that both sides can depend on it.
"""

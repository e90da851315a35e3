"""The decoding engine: scheduler, caches, graphs and search, without any network."""

"""Tests. This file is imported before any other, and so before PyTorch."""

import os

# Threads of several processes that spin while they wait for work stop each other for minutes.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

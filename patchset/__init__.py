# SPDX-License-Identifier: Apache-2.0
"""Applies the version-pinned patch set and the overlay to a vLLM tree."""
__version__ = "0.1.0"

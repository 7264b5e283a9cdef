#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Patch a pinned vLLM with DeepGEMM's FP8 linear layers, check it, take it back."""
import sys

from patchset.cli import main

if __name__ == "__main__":
    sys.exit(main())

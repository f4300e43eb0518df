"""Makes `hf_samples` importable, whichever way the tests are collected."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

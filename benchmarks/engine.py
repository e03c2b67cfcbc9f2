"""`make bench NAME=engine`: see `vllm_ttft`."""

from __future__ import annotations

import sys

from benchmarks.vllm_ttft import main

if __name__ == "__main__":
    sys.exit(main())

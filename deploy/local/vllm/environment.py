"""Where vLLM is, and the environment in which every vLLM process of this repository runs (tests included)."""

from __future__ import annotations

from typing import Final

from deploy.local.spec import ROOT

PYTHON: Final = ROOT / ".venv-vllm" / "bin" / "python"  # made by requirements/vllm-setup.sh


def environment(*, threads: int) -> dict[str, str]:
    """Offline, on loopback, and silent towards the outside. `threads`: of one engine's computing.

    What is cached between runs lies beside the environment, not in anybody's home.
    """
    cache = str(PYTHON.parents[1] / "cache")
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_SERVER_DEV_MODE": "1",  # POST /reset_prefix_cache
        "VLLM_CACHE_ROOT": cache,
        "XDG_CACHE_HOME": cache,
        "OMP_NUM_THREADS": str(threads),
        "UCX_NET_DEVICES": "lo",
        "UCX_TLS": "tcp",
    }

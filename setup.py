"""Builds the compiled index, columns, event scan and simulated tier where Cython and a C compiler are.

The rest is in pyproject.toml. Without them kvpull works the same in pure Python, and says so at start-up.
"""

import importlib.util

from setuptools import Extension, setup

_SCAN = Extension(
    "epp.kvevents._compiled_scan",
    ["epp/kvevents/_compiled_scan.pyx"],
    depends=["epp/core/_packed_events.h", "epp/kvevents/_event_scan.h", "epp/kvevents/_msgpack_scan.h"],
)
_INDEX = Extension(
    "epp.core._compiled_index",
    ["epp/core/_compiled_index.pyx"],
    depends=[
        "epp/core/_block_hash.h",
        "epp/core/_compiled_blocks.pxi",
        "epp/core/_compiled_dump.pxi",
        "epp/core/_compiled_messages.pxi",
        "epp/core/_compiled_record_parts.pxi",
        "epp/core/_compiled_records.pxi",
        "epp/core/_compiled_table.pxi",
        "epp/core/_compiled_waiting.pxi",
        "epp/core/_compiled_windows.pxi",
        "epp/core/_holder_table.h",
        "epp/core/_map_segment.h",
        "epp/core/_packed_events.h",
        "epp/core/_prompt_walk.h",
        "epp/core/_u64_map.h",
        "epp/core/_window_walk.h",
    ],
)
_COLUMNS = Extension("epp.core._compiled_columns", ["epp/core/_compiled_columns.pyx"])
_TIER = Extension("simulator._compiled_tier", ["simulator/_compiled_tier.pyx"])


def _extensions() -> list[Extension]:
    if importlib.util.find_spec("Cython") is None:
        return []
    from Cython.Build import cythonize

    sources = [_INDEX, _COLUMNS, _SCAN, _TIER]
    built: list[Extension] = cythonize(sources, build_dir="build", language_level=3)
    for extension in built:
        extension.optional = True  # cythonize forgets it; without a compiler the install goes on
    return built


setup(ext_modules=_extensions())

"""EndpointPickerConfig: read, refuse what is wrong with its path, and build the picker's settings.

One module a concept: `document` (the file), `instances` (plugins by name), `wiring` (producers and
consumers), `profiles`, `handlers`, `loading` (all of it).
"""

from epp.config.loading import EppConfig, load_config, parse_config
from epp.config.wiring import EXACT_TOKENS_NEEDED

__all__ = ["EXACT_TOKENS_NEEDED", "EppConfig", "load_config", "parse_config"]

"""Token ids as transformers gives them to an engine; run by vLLM's Python.

Usage: encode_texts.py TEXTS.json DIRECTORY... ; prints one JSON list a directory: the ids of every text
with special tokens and then without.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from transformers import AutoTokenizer

texts = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
for directory in sys.argv[2:]:
    tokenizer = AutoTokenizer.from_pretrained(directory)
    print(
        json.dumps(
            [tokenizer.encode(text, add_special_tokens=flag) for flag in (True, False) for text in texts]
        )
    )

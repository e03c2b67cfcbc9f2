"""vLLM's own render servers, one a model directory, in one process; run by vLLM's Python.

Usage: render_servers.py PORT=DIRECTORY[=FLAGS]... , FLAGS a JSON list of words. Why one
process: importing vLLM costs most of the start and of the memory; the servers share nothing else. No
weights are loaded.
"""

from __future__ import annotations

import asyncio
import json
import sys

from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
from vllm.entrypoints.launchers.render.entry import run_launch_fastapi
from vllm.utils.argparse_utils import FlexibleArgumentParser


async def serve(port: str, directory: str, flags: list[str]) -> None:
    options = {
        "--model": directory,
        "--served-model-name": "m",
        "--host": "127.0.0.1",
        "--port": port,
        "--max-model-len": "32768",
        "--tool-call-parser": "pythonic",
    }
    words = ["--enable-auto-tool-choice", "--disable-uvicorn-access-log"]
    words.extend(word for option in options.items() for word in option)
    words.extend(flags)
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(words)
    validate_parsed_serve_args(arguments)
    await run_launch_fastapi(arguments)


async def main() -> None:
    async with asyncio.TaskGroup() as group:
        for pair in sys.argv[1:]:
            port, _, rest = pair.partition("=")
            directory, _, flags = rest.partition("=")
            group.create_task(serve(port, directory, json.loads(flags or "[]")))


if __name__ == "__main__":
    asyncio.run(main())

"""`redknot.server.process.serve` over a scripted engine, as a process: python -m, then settings."""

import asyncio
import json
import sys
from typing import Any

from tests.server.scripted import TOKENIZER, ScriptedEngine

from redknot.engine.client import EngineClient, EngineGone
from redknot.engine.config import EngineConfig
from redknot.server.logs import set_up
from redknot.server.process import serve
from redknot.server.service import Service
from redknot.server.settings import ServerSettings


def main(engine: dict[str, Any], settings: dict[str, Any]) -> int:
    """Serve; the engine ends by itself after `life` seconds, or fails to start with `fault`."""
    life, fault = engine.pop("life", None), engine.pop("fault", None)
    scripted = ScriptedEngine(**engine)

    async def start(config: EngineConfig) -> ScriptedEngine:
        if fault:
            raise EngineGone(fault)
        if life is not None:
            asyncio.get_running_loop().call_later(life, scripted.gone.set)
        return scripted

    def announce(service: Service, address: str) -> None:
        sys.stdout.write(f"{address}\n")
        sys.stdout.flush()

    EngineClient.start = start
    set_up("json")
    good = asyncio.run(serve(EngineConfig(), ServerSettings(**settings), TOKENIZER, announce))
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1]), json.loads(sys.argv[2])))

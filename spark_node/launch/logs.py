"""Logs of a process: lines for people, or JSON lines for machines."""

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TextIO


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, peer, where, what."""

    def __init__(self, peer: str) -> None:
        super().__init__()
        self._peer = peer

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "peer": self._peer,
            "module": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry)


class Lines(logging.Formatter):
    """Time of day, level where it matters, peer, what."""

    def __init__(self, peer: str) -> None:
        super().__init__(f"%(asctime)s %(levelname).1s {peer} %(message)s", "%H:%M:%S")
        self.converter = time.localtime


def log_to(path: Path | None, form: str, peer: str, level: int = logging.INFO, *, alone: bool = True) -> None:
    """Everything that this process logs goes to the file (or stderr) from now on.

    What libraries print goes there too, unless the process is not `alone`: unless it shows something itself.
    """
    target: TextIO = sys.stderr
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        target = path.open("a", encoding="utf-8", buffering=1)
        for stream in (1, 2) if alone else ():
            os.dup2(target.fileno(), stream)
    handler = logging.StreamHandler(target)
    handler.setFormatter(JsonLines(peer) if form == "json" else Lines(peer))
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level)
    logging.getLogger("grpc").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)

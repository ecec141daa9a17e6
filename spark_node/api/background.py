"""One event loop, in a thread beside the user's, for all peers of this process. A notebook has a loop of its own."""

import asyncio
import os
import threading

_lock = threading.Lock()
_loop: asyncio.AbstractEventLoop | None = None


def loop() -> asyncio.AbstractEventLoop:
    """The loop; started when it is first asked for, and again in a child process."""
    global _loop
    with _lock:
        if _loop is None:
            _loop = asyncio.new_event_loop()
            threading.Thread(target=_loop.run_forever, name="spark peers", daemon=True).start()
        return _loop


def _forget() -> None:
    """A forked child has the loop, but not its thread."""
    global _loop, _lock
    _loop, _lock = None, threading.Lock()


os.register_at_fork(after_in_child=_forget)

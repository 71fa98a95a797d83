"""A server in a thread of the test, on a free port of the loopback interface."""

import threading
import time
from contextlib import contextmanager

import uvicorn

from bitwright.llm.serve.app import Server
from bitwright.llm.serve.run import bind
from bitwright.llm.serve.settings import Settings


@contextmanager
def running(models, draft=None, **settings):
    """The server and its address."""
    server = Server(models, Settings(**settings), draft)
    listening = bind("127.0.0.1", 0)
    config = uvicorn.Config(
        server.app(), log_level="warning", access_log=False, timeout_graceful_shutdown=3
    )
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        while not runner.started:
            time.sleep(0.005)
        yield server, f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        runner.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive()

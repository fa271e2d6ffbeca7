"""The HTTP process of a service, which opens the stores and runs the application until SIGTERM."""

from __future__ import annotations

import logging
from types import FrameType

import uvicorn

from weftune.service.api.app import create_app
from weftune.service.api.guard import RequestLimits
from weftune.service.api.native import Streams
from weftune.service.chat import ChatClient
from weftune.service.keys import KeyFile
from weftune.service.settings import ServiceSettings
from weftune.service.store.database import open_requests, open_training
from weftune.service.store.records import TrainingStore
from weftune.service.store.requests import RequestStore

GRACE_SECONDS = 10
"""Maximum seconds after SIGTERM in which requests in progress may end."""


def serve(settings: ServiceSettings, limits: RequestLimits | None = None) -> None:
    """Answer HTTP requests until the process receives SIGTERM. Its supervisor has created the database
    tables."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    requests = RequestStore(open_requests(settings, writable=True))
    training = TrainingStore(open_training(settings, writable=False))
    try:
        keys, chat = KeyFile(settings.keys), ChatClient(settings.chat_socket)
        app = create_app(settings, requests, training, keys, chat, limits)
        app.state.service.preparer.load_base()
        config = uvicorn.Config(
            app,
            host=settings.host,
            port=settings.port,
            log_level="warning",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=GRACE_SECONDS,
        )
        server = _Server(config, app.state.streams)
        server.run()
        if not server.started:
            raise SystemExit(1)
    finally:
        requests.close()
        training.close()


class _Server(uvicorn.Server):
    """An HTTP server that ends open streams when it is stopped, so that their clients reconnect."""

    def __init__(self, config: uvicorn.Config, streams: Streams) -> None:
        super().__init__(config)
        self._streams = streams

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._streams.is_closing = True
        super().handle_exit(sig, frame)

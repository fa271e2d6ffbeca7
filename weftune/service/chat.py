"""Chat between the HTTP process, which has clients, and the training process, which has the base.

Both sides write JSON lines to a Unix socket. A request is

    {"id", "model": null | {"job", "step": int | null}, "messages": [...] or "prompt", "sampling": {...}}

and its answers are {"id", "text"} pieces, then {"id", "finish_reason", "prompt_tokens", "completion_tokens"}
or {"id", "error", "code"}. A connection that is closed cancels its requests. The module does not import
torch: creating a `ChatServer` imports the modules that generate answers.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
import os
import queue
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weftune.core.files import json_text
from weftune.errors import UserError
from weftune.service.chat_requests import (
    ChatEnd,
    ChatError,
    ChatRequest,
    parse_line,
    parse_request,
    request_values,
)

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from weftune.run.passes.adapted import AdaptedBase
    from weftune.service.answering import ChatAnswer

LINE_BYTES = 16 << 20
"""Maximum bytes of a chat request, which is one line of JSON."""
UNREAD_BYTES = 4 << 20
"""Bytes of answers that a client may leave unread before its connection is closed."""
SOCKET_PATH_BYTES = 100
"""Maximum bytes of a socket's path; Linux allows 107."""

logger = logging.getLogger(__name__)


# -- the HTTP process ------------------------------------------------------------------------------------


class ChatClient:
    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path

    def has_server(self) -> bool:
        """Return whether a training process listens for prompts, which it does as soon as it has loaded the
        base."""
        try:
            with socket.socket(socket.AF_UNIX) as probe, socket_address(self._path) as address:
                probe.connect(address)
        except OSError:
            return False
        return True

    async def ask(self, request: ChatRequest) -> AsyncGenerator[str | ChatEnd, None]:
        """Yield pieces of the answer as they are generated, and finally its `ChatEnd`. Raise ChatError.

        Closing the iterator before the end cancels the answer.
        """
        try:
            with socket_address(self._path) as address:
                reader, writer = await asyncio.open_unix_connection(address, limit=LINE_BYTES)
        except OSError as error:
            raise ChatError(
                "The training process is not running at the moment; try again.", "unavailable"
            ) from error
        try:
            writer.write(_json_line(request_values(request)))
            while line := await reader.readline():
                answer = json.loads(line)
                if "error" in answer:
                    raise ChatError(answer["error"], answer["code"])
                if "text" in answer:
                    yield answer["text"]
                    continue
                yield ChatEnd(answer["finish_reason"], answer["prompt_tokens"], answer["completion_tokens"])
                return
        except OSError as error:
            raise ChatError("The training process ended during the answer.", "unavailable") from error
        finally:
            writer.close()
        raise ChatError("The training process ended during the answer.", "unavailable")


# -- the training process --------------------------------------------------------------------------------


class ChatServer:
    """A server that answers prompts with the base that is used for training.

    One thread owns the socket and the tokenizers. The training thread calls `take_turn` between passes of the
    base and when no job trains; no other thread uses the base. Invalid requests raise no errors in the
    training thread.
    """

    def __init__(
        self,
        adapted_base: AdaptedBase,
        tokenizer: PreTrainedTokenizerBase,
        jobs_folder: Path,
        socket_path: Path,
        cache_bytes: int,
        adapter_bytes: int,
    ) -> None:
        """Open the socket and start the thread that serves it. `cache_bytes` is the size of the KV cache for
        all answers, and `adapter_bytes` the device memory for adapters that are attached only to answer.
        `tokenizer` is the base's tokenizer."""
        from weftune.service.answering import AnsweringBase

        self._base = AnsweringBase(adapted_base, tokenizer, jobs_folder, cache_bytes, adapter_bytes)
        self._path = socket_path
        self._arrivals: queue.SimpleQueue[tuple[_Exchange, Any]] = queue.SimpleQueue()
        """Queue of exchanges (requests from clients) for the training thread, each with its tokenised prompt,
        or with None if the client has cancelled the exchange."""
        self._arrived = threading.Event()
        self._answers: dict[_Exchange, ChatAnswer] = {}
        """Maps each exchange (a client's request) whose answer is being generated to this answer."""
        self._last_turn = -math.inf
        """Monotonic time, in seconds, of the last call of `take_turn` that generated a token."""
        self._loader = ThreadPoolExecutor(1, "chat tokenizers")
        self._loop = asyncio.new_event_loop()
        self._exchanges: set[_Exchange] = set()
        self._socket = _listening_socket(socket_path)
        self._thread = threading.Thread(target=self._serve, name="chat socket", daemon=True)
        self._thread.start()

    @property
    def is_active(self) -> bool:
        """Whether a client is waiting for an answer."""
        return bool(self._answers) or not self._arrivals.empty()

    @property
    def unused_adapter_bytes(self) -> int:
        """Device bytes that are reserved for adapters that answer prompts and are not in use."""
        return self._base.unused_adapter_bytes

    def was_active_within(self, seconds: float) -> bool:
        """Return whether a client is waiting for an answer, or was waiting within the last `seconds`."""
        return self.is_active or time.monotonic() - self._last_turn < seconds

    def take_turn(self) -> bool:
        """Accept new prompts, and generate one more token of every answer. Return whether there was any work.

        Must be called by the training thread, outside a pass."""
        self._arrived.clear()
        with suppress(queue.Empty):
            while True:
                self._apply_request(*self._arrivals.get_nowait())
        if not self._answers:
            return False
        self._last_turn = time.monotonic()
        for exchange, answer in list(self._answers.items()):
            if (sentence := self._base.detachment_text(answer)) is not None:
                self._send_error(exchange, ChatError(sentence, "unavailable"))
        try:
            continued = self._base.run_pass()
        except Exception:
            # A failure of the decoder, such as a full device, must not end training.
            logger.exception("chat: a pass failed, and its answers were ended")
            for exchange in list(self._answers):
                self._send_error(
                    exchange, ChatError("The answer could not be computed; try again.", "unavailable")
                )
            self._base.reset()
            return True
        for exchange, answer in list(self._answers.items()):
            if answer in continued:
                self._send_answer(exchange, answer)
        return True

    def wait(self, seconds: float) -> bool:
        """Wait for a request for at most `seconds`, and return whether one arrived. The training thread calls
        this while it is idle."""
        return self._arrived.wait(seconds) or self.is_active

    def close(self) -> None:
        """End all answers, close the socket, and detach the adapters that were attached for answers."""
        for exchange in list(self._exchanges):
            exchange.reply_error(ChatError("The service is stopping; try again.", "unavailable"))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loader.shutdown(cancel_futures=True)
        self._path.unlink(missing_ok=True)
        for answer in self._answers.values():
            self._base.cancel(answer)
        self._answers.clear()
        self._base.close()

    # -- the thread that trains --------------------------------------------------------------------------

    def _apply_request(self, exchange: _Exchange, prompt: Any) -> None:
        if prompt is None:
            if (answer := self._answers.pop(exchange, None)) is not None:
                self._base.cancel(answer)
            return
        if exchange.is_closed:
            return
        try:
            self._answers[exchange] = self._base.submit(exchange.request, prompt)
        except ChatError as error:
            exchange.reply_error(error)
        except UserError as error:
            sentence = str(error).replace("--max-tokens", "max_tokens")
            exchange.reply_error(ChatError(sentence, "invalid_request"))
        except Exception:
            logger.exception("chat: a request failed")
            exchange.reply_error(ChatError("The answer could not be started; try again.", "unavailable"))

    def _send_answer(self, exchange: _Exchange, answer: ChatAnswer) -> None:
        if text := answer.stream.update():
            exchange.reply({"text": text})
        if (reason := answer.stream.finish_reason) is None:
            return
        del self._answers[exchange]
        self._base.cancel(answer)
        generation = answer.stream.generation
        exchange.reply(
            {
                "finish_reason": reason,
                "prompt_tokens": len(generation.prompt),
                "completion_tokens": len(generation.tokens),
            }
        )

    def _send_error(self, exchange: _Exchange, error: ChatError) -> None:
        self._base.cancel(self._answers.pop(exchange))
        exchange.reply_error(error)

    # -- the thread of the socket ------------------------------------------------------------------------

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        server = self._loop.run_until_complete(
            asyncio.start_unix_server(self._handle_connection, sock=self._socket, limit=LINE_BYTES)
        )
        self._loop.run_forever()
        server.close()
        rest = asyncio.all_tasks(self._loop)
        for task in rest:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*rest, return_exceptions=True))
        self._loop.run_until_complete(asyncio.sleep(0))
        self._loop.close()

    async def _handle_connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        own: set[_Exchange] = set()
        tasks: set[asyncio.Task[None]] = set()
        try:
            while line := await reader.readline():
                exchange = _Exchange(self._loop, writer)
                own.add(exchange)
                self._exchanges.add(exchange)
                task = asyncio.create_task(self._prepare_prompt(exchange, line))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
        except ValueError:
            sentence = f"The request is longer than {LINE_BYTES:,} bytes."
            writer.write(_json_line({"id": None, "error": sentence, "code": "invalid_request"}))
        except OSError:
            pass
        finally:
            for exchange in own:
                exchange.is_closed = True
                self._arrivals.put((exchange, None))
            self._exchanges -= own
            self._arrived.set()
            writer.close()

    async def _prepare_prompt(self, exchange: _Exchange, line: bytes) -> None:
        """Parse a request and tokenise its prompt, in the server's own thread."""
        try:
            values = parse_line(line)
            exchange.id = values.get("id")
            exchange.request = parse_request(values)
            prompt = await self._loop.run_in_executor(self._loader, self._base.tokenise, exchange.request)
        except ChatError as error:
            exchange.reply_error(error)
        except UserError as error:
            exchange.reply_error(ChatError(str(error), "invalid_request"))
        except asyncio.CancelledError:
            raise
        except Exception:
            logger.exception("chat: a prompt could not be read")
            exchange.reply_error(ChatError("The prompt could not be read.", "invalid_request"))
        else:
            self._arrivals.put((exchange, prompt))
            self._arrived.set()


@dataclass(slots=True, eq=False)
class _Exchange:
    """One request of a client for an answer, and the connection over which the answer is sent. Any thread may
    send it."""

    loop: asyncio.AbstractEventLoop
    writer: asyncio.StreamWriter
    id: Any = None
    request: ChatRequest = field(default_factory=lambda: ChatRequest(id="", messages=()))
    is_closed: bool = False

    def reply(self, values: Mapping[str, Any]) -> None:
        if not self.is_closed:
            self.loop.call_soon_threadsafe(self._write_line, _json_line({"id": self.id, **values}))

    def reply_error(self, error: ChatError) -> None:
        self.reply({"error": str(error), "code": error.code})

    def _write_line(self, line: bytes) -> None:
        if self.writer.is_closing():
            return
        self.writer.write(line)
        if self.writer.transport.get_write_buffer_size() > UNREAD_BYTES:
            self.writer.transport.abort()


# -- lines and sockets ----------------------------------------------------------------------------------


def _json_line(values: Mapping[str, Any]) -> bytes:
    # Half of a character outside the basic plane, which JSON allows, has no UTF-8.
    return (json_text(values) + "\n").encode("utf-8", "replace")


def _listening_socket(path: Path) -> socket.socket:
    """Return a socket at `path` that only this user may connect to."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    bound = socket.socket(socket.AF_UNIX)
    with socket_address(path) as address:
        bound.bind(address)
    # Nobody can connect before it listens; from then on connections wait for the thread that accepts them.
    path.chmod(0o600)
    bound.listen()
    return bound


@contextmanager
def socket_address(path: Path) -> Iterator[str]:
    """Yield an address for a Unix socket at `path`, even if the path is longer than the system allows."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)

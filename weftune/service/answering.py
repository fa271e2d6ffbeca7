"""Generation of answers to prompts with the base model on which jobs train. An adapter is attached to the
base when a prompt requests that adapter."""

from __future__ import annotations

import copy
import hashlib
from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from transformers import PreTrainedTokenizerBase

from weftune.adapters.folder import WEIGHTS, check_adapter_folder
from weftune.data.tokenise import prompt_tokens
from weftune.errors import AdapterError, UserError
from weftune.generate.adapters import attach_adapter_folder
from weftune.generate.answers import StreamedAnswer, adapter_tokenizer, stop_ids
from weftune.generate.decoder import Decoder
from weftune.generate.sampling import Sampling
from weftune.run.passes.adapted import AdaptedBase
from weftune.service.chat_requests import ChatError, ChatRequest
from weftune.service.settings import adapter_folder

TOKENIZERS = 16
"""Maximum number of tokenizers of finished adapters that are kept in memory."""
MAX_ATTACHED = 32
"""Maximum number of adapters that stay attached to the base model only to answer prompts."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A tokenised prompt, and the location and size of the adapter that will answer it."""

    tokens: list[int]
    tokenizer: PreTrainedTokenizerBase
    folder: Path | None
    """Folder of the adapter that answers. None for the bare base model, and for an adapter that is already
    attached because its job trains."""
    adapter_bytes: int = 0


@dataclass(slots=True, eq=False)
class ChatAnswer:
    stream: StreamedAnswer
    serial: int | None
    """Serial number of the attachment of the answering adapter to the base model, which changes if the
    adapter is detached and attached again. None for the bare base model."""


class AnsweringBase:
    """A generator of answers with the base model on which jobs train. All methods must be called by the
    training thread, except `tokenise`, which one other thread calls."""

    def __init__(
        self,
        adapted_base: AdaptedBase,
        tokenizer: PreTrainedTokenizerBase,
        jobs_folder: Path,
        cache_bytes: int,
        adapter_bytes: int,
    ) -> None:
        self._adapted, self._jobs = adapted_base, jobs_folder
        self._cache_bytes, self._adapter_bytes = cache_bytes, adapter_bytes
        self._stop_ids = stop_ids(adapted_base.base.model, tokenizer)
        self._base_tokenizer = tokenizer, copy.deepcopy(tokenizer)
        self._tokenizers: OrderedDict[str, tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]]
        self._tokenizers = OrderedDict()
        """Maps the hash of a tokenizer's files to two copies of the tokenizer, one for encoding and one for
        decoding, which run in different threads."""
        self._attached_bytes: OrderedDict[str, int] = OrderedDict()
        """Maps each adapter that is attached only to answer prompts to its bytes on the device, the least
        recently used adapter first."""
        self._running_answers: set[ChatAnswer] = set()
        self._refusal = ""
        """Reason why this base model cannot generate text. Empty if it can."""
        self._decoder: Decoder | None = None
        try:
            self._open_decoder()
        except UserError as error:
            self._refusal = str(error)

    def _open_decoder(self) -> Decoder:
        if self._decoder is None:
            self._decoder = Decoder(self._adapted, self._cache_bytes)
        return self._decoder

    def reset(self) -> None:
        """Delete the decoder, whose state is unknown after a failure; a new one is created for the next
        prompt."""
        self._running_answers.clear()
        self._decoder = None

    def close(self) -> None:
        for name in list(self._attached_bytes):
            self._detach_adapter(name)

    # -- the other thread --------------------------------------------------------------------------------

    def tokenise(self, request: ChatRequest) -> ChatPrompt:
        """Return the tokens of a prompt. Raise ChatError for an unknown model, and UserError for a
        prompt that the chat template refuses."""
        if self._refusal:
            raise ChatError(self._refusal, "unavailable")
        folder, size = self._locate_adapter(request)
        decodes, encodes = self._load_tokenizers(folder)
        if request.prompt is not None:
            tokens = prompt_tokens(encodes, request.prompt, is_plain_text=True)
        else:
            messages: list[Any] = [dict(one) for one in request.messages]
            tokens = prompt_tokens(encodes, messages)
        return ChatPrompt(tokens, decodes, folder, size)

    def _locate_adapter(self, request: ChatRequest) -> tuple[Path | None, int]:
        """Return the folder of the adapter that a request asks for, and the adapter's bytes on the device.
        Return (None, 0) for the bare base model and for an adapter that is attached because its job
        trains."""
        if request.job is None or (request.step is None and request.job in self._adapted.banks.attached):
            return None, 0
        folder = adapter_folder(self._jobs, request.job, request.step)
        try:
            check_adapter_folder(folder)
            with safe_open(folder / WEIGHTS, "pt") as file:
                values = sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        except (AdapterError, OSError, SafetensorError) as error:
            raise ChatError(
                "There is no such model, or its job has not finished.", "model_not_found"
            ) from error
        return folder, values * self._adapted.base.dtype.itemsize

    def _load_tokenizers(
        self, folder: Path | None
    ) -> tuple[PreTrainedTokenizerBase, PreTrainedTokenizerBase]:
        files = [] if folder is None else [folder / name for name in TOKENIZER_FILES]
        digest = hashlib.sha256()
        for path in files:
            digest.update(path.read_bytes() if path.is_file() else b"")
            digest.update(b"\0")
        if folder is None or not any(path.is_file() for path in files):
            return self._base_tokenizer
        key = digest.hexdigest()
        if key not in self._tokenizers:
            found = adapter_tokenizer(folder, self._base_tokenizer[0])
            self._tokenizers[key] = found, copy.deepcopy(found)
            if len(self._tokenizers) > TOKENIZERS:
                self._tokenizers.popitem(last=False)
        self._tokenizers.move_to_end(key)
        return self._tokenizers[key]

    # -- the thread that trains --------------------------------------------------------------------------

    def submit(self, request: ChatRequest, prompt: ChatPrompt) -> ChatAnswer:
        """Queue a tokenised prompt for the decoder and return its answer. Raise ChatError or UserError if the
        prompt cannot be answered."""
        name = request.job
        if prompt.folder is not None:
            name = self._attach_adapter(request, prompt)
        elif name is not None and name not in self._adapted.banks.attached:
            raise ChatError("The job has just left the device; try again.", "unavailable")
        wanted = request.sampling
        sampling = Sampling(
            max_tokens=wanted.max_tokens,
            temperature=wanted.temperature,
            top_p=wanted.top_p,
            presence_penalty=wanted.presence_penalty,
            seed=wanted.seed,
            stop_ids=self._stop_ids,
        )
        generation = self._open_decoder().submit(prompt.tokens, sampling, name)
        stream = StreamedAnswer(name or "", generation, prompt.tokenizer, wanted.stop)
        serial = None if name is None else self._adapted.banks.attached[name].serial
        answer = ChatAnswer(stream, serial)
        self._running_answers.add(answer)
        return answer

    def cancel(self, answer: ChatAnswer) -> None:
        """Stop generating an answer, unless it has ended, and release its memory."""
        self._running_answers.discard(answer)
        if self._decoder is not None:
            self._decoder.cancel(answer.stream.generation)

    def detachment_text(self, answer: ChatAnswer) -> str | None:
        """Return a sentence for the client if the adapter that generates the answer is no longer attached,
        and None otherwise."""
        attached = self._adapted.banks.attached.get(answer.stream.adapter)
        if answer.serial is None or (attached is not None and attached.serial == answer.serial):
            return None
        return "The job left the device during the answer; ask again, or ask its finished adapter."

    def run_pass(self) -> Collection[ChatAnswer]:
        """Run one pass of the decoder, which may generate one token for each answer in progress. Return the
        answers that got a token."""
        continued = set(self._open_decoder().run_pass())
        return {answer for answer in self._running_answers if answer.stream.generation in continued}

    @property
    def unused_adapter_bytes(self) -> int:
        """Device memory, in bytes, that is reserved for adapters that answer prompts and that no attached
        adapter uses."""
        return self._adapter_bytes - sum(self._attached_bytes.values())

    # -- adapters ----------------------------------------------------------------------------------------

    def _attach_adapter(self, request: ChatRequest, prompt: ChatPrompt) -> str:
        """Attach the finished adapter of a request to the base model, unless it is attached already, and
        return the name under which it is attached."""
        assert prompt.folder is not None
        # Jobs that train are attached under their ids, which have no colon.
        name = f"chat:{request.job}:{'' if request.step is None else request.step}"
        if name not in self._attached_bytes:
            self._free_memory(prompt.adapter_bytes)
            attach_adapter_folder(self._adapted, name, prompt.folder)
            self._attached_bytes[name] = prompt.adapter_bytes
        self._attached_bytes.move_to_end(name)
        return name

    def _free_memory(self, size: int) -> None:
        """Detach the least recently used adapters that answer no prompt until another adapter of `size` bytes
        fits. Raise ChatError if this does not free enough memory."""
        used = {answer.stream.adapter for answer in self._running_answers}
        for name in [name for name in self._attached_bytes if name not in used]:
            if self._has_room(size):
                return
            self._detach_adapter(name)
        if not self._has_room(size):
            raise ChatError(
                f"The adapter takes {size:,} bytes, and the memory for adapters that answer, "
                f"{self._adapter_bytes:,} bytes, is in use; try again later.",
                "unavailable",
            )

    def _has_room(self, size: int) -> bool:
        return len(self._attached_bytes) < MAX_ATTACHED and size <= self.unused_adapter_bytes

    def _detach_adapter(self, name: str) -> None:
        del self._attached_bytes[name]
        with self._adapted.on_stream():
            self._adapted.banks.detach(name)

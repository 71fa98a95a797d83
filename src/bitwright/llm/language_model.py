"""`LanguageModel`: a loaded model with its tokenizer, sessions and generations.

lm = LanguageModel("model.gguf", threads=2)
session = lm.session()
logits = session.run(lm.tokenize("The capital of France is"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from bitwright.errors import BitwrightError, RunError
from bitwright.llm.embeddings import DecoderEmbedder
from bitwright.llm.engine.compiled import compile_model
from bitwright.llm.engine.decoder import Array, Decoder
from bitwright.llm.engine.engine import Engine
from bitwright.llm.engine.session import Session, load_session, weight_samples
from bitwright.llm.generation.constraint import Constraints
from bitwright.llm.generation.job import Job, Piece
from bitwright.llm.generation.options import Options
from bitwright.llm.generation.results import Stream
from bitwright.llm.generation.scheduler import Scheduler
from bitwright.llm.generation.speculation import Drafter, DraftModel, PromptLookup
from bitwright.llm.model import DecoderModel, load_model
from bitwright.llm.text.chat_template import ChatTemplate, check_messages
from bitwright.llm.text.source import read_template, read_tokenizer
from bitwright.llm.text.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]


class LanguageModel:
    """A model ready to run.

    `model` is a path (GGUF file, Hugging Face folder, .bw file) or what `load_model` returned.
    `context` is the number of positions of each sequence, `slots` how many sequences run at once.
    """

    def __init__(
        self,
        model: Any,
        threads: int | None = None,
        context: int | None = None,
        *,
        slots: int = 1,
        cache: str = "f16",
        exact: bool = False,
        target: str = "cpu",
    ) -> None:
        path = None
        if isinstance(model, str | Path):
            path = Path(model)
            model = load_model(model, context=context, cache=cache, slots=slots, exact=exact)
        self.model = model
        self.name: str = model.name
        layout = f"context={context} slots={slots} cache={cache} exact={exact}"
        self.engine = Engine(Decoder(compile_model(model, path, layout, threads, target)))
        self.scheduler = Scheduler(self.engine)
        self._path, self._threads, self._target = path, threads, target

    # text

    @cached_property
    def tokenizer(self) -> Tokenizer:
        source = self.model.tokenizer_source
        if source is None:
            raise BitwrightError(f"the model {self.name!r} has no tokenizer")
        return read_tokenizer(source)

    @cached_property
    def chat_template(self) -> ChatTemplate | None:
        """The template of conversations that came with the model."""
        text = read_template(self.model.tokenizer_source)
        return None if text is None else ChatTemplate(text)

    def tokenize(self, text: str | bytes, *, special: bool = False) -> list[int]:
        """Tokens of a text: no begin token, and names of control tokens are plain text.

        With `special` they become the control tokens.
        """
        return self.tokenizer.encode(text, special=special)

    def detokenize(self, tokens: Iterable[int], *, special: bool = False) -> str:
        """The text of tokens, control tokens left out unless `special`."""
        return self.tokenizer.decode(tokens, special=special)

    def chat_prompt(self, messages: Sequence[Mapping[str, Any]], **values: Any) -> list[int]:
        """Tokens of a conversation, rendered by the model's template.

        What the messages say is plain text, also where it looks like a control token.
        """
        if self.chat_template is None:
            raise RunError(
                f"the model {self.name!r} has no chat template",
                hint="Give a plain text as the prompt.",
            )
        tokenizer = self.tokenizer
        begin, end = tokenizer.special.begin, sorted(tokenizer.special.end)
        text_of = tokenizer.vocabulary.text
        names = {
            "bos_token": "" if begin is None else text_of(begin),
            "eos_token": text_of(end[0]) if end else "",
        }
        text = self.chat_template.render(
            check_messages(messages), guard=tokenizer.guard, **(names | values)
        )
        tokens = tokenizer.encode(text, special=True)
        begins = tokenizer.begin_tokens
        return tokens if not begins or tokens[:1] == begins else begins + tokens

    def prompt_tokens(self, prompt: Prompt) -> list[int]:
        """Tokens of a text (with a begin token where the model expects one), of messages, or
        the given tokens."""
        if isinstance(prompt, str | bytes):
            return self.tokenizer.prompt(prompt)
        if isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], Mapping):
            return self.chat_prompt(prompt)  # type: ignore[arg-type]
        if isinstance(prompt, Sequence) or hasattr(prompt, "tolist"):
            tokens = [int(token) for token in prompt]  # type: ignore[arg-type]
            self.tokenizer.check(tokens)
            return tokens
        raise RunError(
            "a prompt is a text, a list of messages or a list of tokens",
            found=type(prompt).__name__,
        )

    # running

    @property
    def context(self) -> int:
        """Positions of each sequence."""
        return self.engine.context

    @cached_property
    def _fingerprint(self) -> str:
        return self.engine.decoder.fingerprint([self.name, *weight_samples(self.model)])

    def session(self) -> Session:
        """An empty sequence."""
        return Session(self.engine, self._fingerprint)

    def load_session(self, path: str | Path) -> Session:
        """The session that `Session.save` wrote."""
        return load_session(self.engine, self._fingerprint, path)

    @cached_property
    def embedder(self) -> DecoderEmbedder:
        """Makes vectors of texts; a graph of its own, compiled when it is first asked for."""
        if not isinstance(self.model, DecoderModel):
            raise BitwrightError(f"the model {self.name!r} makes no embeddings")
        return DecoderEmbedder(self.model, self._threads, target=self._target, path=self._path)

    def embed(self, texts: Iterable[str | Sequence[int]]) -> Array:
        """One vector of length 1 for each text or list of tokens, f32[texts, width]."""
        return self.embedder.embed_texts(texts)

    @cached_property
    def _constraints(self) -> Constraints:
        size = min(self.tokenizer.vocabulary.size, self.engine.decoder.vocabulary)
        return Constraints(self.tokenizer, size)

    def drafter(self, draft: Any) -> Drafter | None:
        """What guesses tokens: "prompt" for prompt lookup, or a smaller model."""
        if draft is None:
            return None
        if draft == "prompt":
            return PromptLookup()
        if isinstance(draft, LanguageModel):
            return DraftModel(draft.engine, self.engine.decoder.vocabulary)
        raise RunError(
            'draft is "prompt" or a LanguageModel', where="draft", found=repr(draft)[:80]
        )

    def start(self, prompt: Prompt, options: Options, *, draft: Any = None) -> Stream:
        """Queue a generation."""
        stream = Stream(self.scheduler)
        tokens = self.prompt_tokens(prompt)
        stream.job = self.job(tokens, options, stream.take, self.drafter(draft))
        self.scheduler.add(stream.job)
        return stream

    def job(
        self,
        tokens: list[int],
        options: Options,
        emit: Callable[[Piece], None],
        drafter: Drafter | None = None,
    ) -> Job:
        """A generation that the scheduler can run; `emit` gets its pieces."""
        constraint = self._constraints.make(options) if options.is_constrained else None
        return Job(tokens, options, self.tokenizer, emit, constraint, drafter)

    def __repr__(self) -> str:
        decoder = self.engine.decoder
        return (
            f"<language model {self.name!r}: {decoder.vocabulary} tokens, {decoder.slots} × "
            f"{decoder.context} positions, {decoder.executable.engine.description}>"
        )

"""A zoo model with lm-evaluation-harness's interface: text in, log-likelihoods and text out.

Splitting contexts from continuations, truncating long texts and stopping answers all follow the
harness's own model for Hugging Face folders (HFLM).
"""

from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from data.tokenizer import Tokenizer
from recipes.common.generation.generator import Generator, Sampling
from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree
from recipes.instruments.harness.scoring import Row, Scorer

ANSWER = 256  # tokens of an answer, if the task sets no limit


class Model(TemplateLM):
    """Adapts a zoo model to the harness's TemplateLM, which scores tokens.

    Every process of a run gets all requests, and all processes answer them together.
    """

    def __init__(
        self,
        layout: Layout,
        variables: Tree,
        tokens: Tokenizer,
        batch_size: int,
        context: int,
        about: dict[str, Any],
    ):
        """Compiles nothing yet.

        Args:
          variables: the model's variables, on the layout's mesh.
          batch_size: most sequences at a time.
          context: most tokens that the model can attend to.
          about: description of the model for the results.
        """
        super().__init__()
        self._about = about | {"max_length": context}
        self._layout, self._variables, self._tokens = layout, variables, tokens
        self._batch_size, self._context = batch_size, context
        self._score = Scorer(layout, variables, batch_size, context)
        self._generators: dict[Sampling, Generator] = {}
        begin, end = tokens.control("bos"), tokens.control("eos")
        self._begin, self._begin_text = begin or end or ((*tokens.end, 0)[0], "")
        self._end, self._end_text = end or ((*tokens.end, self._begin)[0], "")

    def get_model_info(self) -> dict[str, Any]:
        return self._about

    # ---- text and tokens -------------------------------------------------------------------------

    @property
    def tokenizer_name(self) -> str:
        """A hash that differs if text is tokenized or rendered differently."""
        return self._tokens.sha256

    @property
    def eot_token_id(self) -> int:
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text that has no context."""
        return self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Encodes text to ids, including control tokens that a rendered template spells out."""
        ids = self._tokens.encode_rendered(string).tolist()
        begins = (
            add_special_tokens is None and self._begin_text and string.startswith(self._begin_text)
        )
        if add_special_tokens is False or begins:
            return ids
        return [*self._tokens.start, *ids]

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Renders a conversation with the model's chat template.

        Without a generation prompt, the last message is the start of an answer and is left open.
        """
        text = self._tokens.render(chat_history, add_generation_prompt)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].lstrip()
        last = last if last in text else last.strip()  # as templates do
        return text[: text.rindex(last) + len(last)]

    # ---- log-likelihoods -------------------------------------------------------------------------

    def loglikelihood(self, requests, disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(self, requests, **_) -> list[tuple[float, bool]]:
        """Scores (texts, context, continuation), tokenized; long contexts are cut at the front."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self._context:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens and the model sees "
                    f"{self._context}; use a larger --seq_len, if it was trained on as many, or "
                    "other --tasks"
                )
            tokens = [*context, *continuation][-(self._context + 1) :]
            rows.append(Row(tokens, len(continuation)))
        return self._score(rows)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Scores whole texts, in windows of the context; each token counts once."""
        windows, of = [], []
        for number, request in enumerate(requests):
            made = utils.get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self._context,
                context_len=1,
            )
            for context, continuation in map(utils.make_disjoint_window, made):
                windows.append(Row([*context, *continuation], len(continuation)))
                of.append(number)
        totals = [0.0] * len(requests)
        for number, (nats, _) in zip(of, self._score(windows), strict=True):
            totals[number] += nats
        return totals

    # ---- answers ---------------------------------------------------------------------------------

    def generate_until(self, requests, disable_tqdm: bool = True) -> list[str]:
        """Generates text after each context, up to a stop string or the end token."""
        answers, alike = [""] * len(requests), {}
        for number, request in enumerate(requests):
            text, kwargs = request.args
            prompt, key = self.tok_encode(text) or [self._begin], _generation_settings(kwargs)
            alike.setdefault(key, []).append((number, prompt))
        for (sampling, most, until), members in alike.items():
            room = self._context - most
            if room < 1:
                raise UserError(
                    f"an answer of {most} tokens leaves no room for its question in the "
                    f"{self._context} that the model sees; use a larger --seq_len, if it was "
                    "trained on as many, or other --tasks"
                )
            members.sort(key=lambda member: -len(member[1]))  # batches of similar length
            for first in range(0, len(members), self._batch_size):
                part = members[first : first + self._batch_size]
                prompts = [np.array(prompt[-room:], np.int32) for _, prompt in part]
                texts = self._write(prompts, sampling, most, until, first)
                for (number, _), text in zip(part, texts, strict=True):
                    answers[number] = text
        return answers

    def _write(
        self,
        prompts: list[np.ndarray],
        sampling: Sampling,
        most: int,
        until: tuple[str, ...],
        first: int,
    ) -> list[str]:
        """Generates after each prompt, without the stop string; `first` is the first prompt's number."""
        stops = [stop for stop in (*until, self._end_text) if stop]
        if sampling not in self._generators:
            self._generators[sampling] = Generator(
                self._layout, self._variables, sampling, self._tokens.end, self._tokens.vocabulary,
                rows=self._batch_size,
            )  # fmt: skip
        written: list[list[int]] = [[] for _ in prompts]
        streams, shown = [self._tokens.stream() for _ in prompts], [""] * len(prompts)
        open_ = set(range(len(prompts)))
        for tokens_N in self._generators[sampling](prompts, most, first):
            for i in sorted(open_):
                token = int(tokens_N[i])
                if token >= 0:
                    written[i].append(token)
                    shown[i] += streams[i].put(token)
                if token < 0 or any(stop in shown[i] for stop in stops):
                    open_.remove(i)
            if not open_:
                break
        # Decode everything again, as HFLM does: some tokenizers drop a leading space.
        texts = [self._tokens.decode(tokens) for tokens in written]
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts


def _generation_settings(arguments: dict[str, Any]) -> tuple[Sampling, int, tuple[str, ...]]:
    """(sampling, most tokens, stop strings) from a task's generation_kwargs."""
    settings = dict(normalize_gen_kwargs(arguments, ANSWER))
    most, until = settings.pop("max_gen_toks"), tuple(settings.pop("until"))
    sampled = settings.pop("do_sample", False)
    names = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    chosen = {name: settings.pop(name, default) for name, default in names.items()}
    if others := {name for name, value in settings.items() if (name, value) != ("num_beams", 1)}:
        raise UserError(
            f"a task sets {min(others)}={settings[min(others)]} in its generation_kwargs, which is "
            f"not supported; use tasks with only {', '.join(('until', 'max_gen_toks', *names))}"
        )
    return Sampling(**chosen) if sampled else Sampling(), most, until

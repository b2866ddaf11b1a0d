"""A model of ours as lm-evaluation-harness wants one: text in, log-likelihoods and text out.

Where a context ends and its continuation begins, what is cut of a text that is too long, and what
stops an answer are as with the harness's own model for Hugging Face's folders (HFLM).
"""

from typing import Any

import numpy as np
from lm_eval import utils
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs

from data.tokenizer import START, Tokenizer
from recipes.common.generation import Generator, Sampling
from recipes.common.harness.scoring import Row, Scorer
from recipes.common.runtime import UserError
from recipes.common.sharding import Layout, Tree

ANSWER = 256  # tokens of an answer, where a task does not say how many


class Model(TemplateLM):
    """Of the harness's classes, the one whose log-likelihoods are of tokens.

    Every process of a run is given all requests, and answers them together with the others.
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
        """
        Args:
          variables: the model's, on the layout's mesh.
          batch_size: sequences at a time, at most.
          context: tokens that the model sees at most.
          about: what the results say of the model.
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
        """Tells apart what is tokenised or rendered differently."""
        return self._tokens.sha256

    @property
    def eot_token_id(self) -> int:
        return self._end

    @property
    def prefix_token_id(self) -> int:
        """What stands in front of a text without a context."""
        return self._begin

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_) -> list[int]:
        """Ids; a text that spells control tokens, as a rendered template does, has them."""
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
        """A conversation as the model's chat template writes it.

        Without a generation prompt the last message is the beginning of an answer, and stays open.
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
        """Of (texts, context, continuation), the latter two in tokens; the context is cut in front."""
        rows = []
        for _, context, continuation in requests:
            if len(continuation) > self._context:
                raise UserError(
                    f"a continuation has {len(continuation)} tokens and the model sees "
                    f"{self._context}; use a larger --seq_len, if it was trained on as many, or "
                    "other --tasks"
                )
            whole = [*context, *continuation][-(self._context + 1) :]
            rows.append(Row(whole, len(continuation)))
        return self._score(rows)

    def loglikelihood_rolling(self, requests, disable_tqdm: bool = True) -> list[float]:
        """Of whole texts, in windows of the context; each token is scored once."""
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
        """What the model writes after each context, until a string that ends it, or its own end."""
        answers, alike = [""] * len(requests), {}
        for number, request in enumerate(requests):
            text, asked = request.args
            prompt, key = self.tok_encode(text) or [self._begin], _asked(asked)
            alike.setdefault(key, []).append((number, prompt))
        for (sampling, most, until), members in alike.items():
            room = self._context - most
            if room < 1:
                raise UserError(
                    f"an answer of {most} tokens leaves no room for its question in the "
                    f"{self._context} that the model sees; use a larger --seq_len, if it was trained "
                    "on as many, or other --tasks"
                )
            members.sort(key=lambda member: -len(member[1]))  # those of similar length together
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
        """What follows each prompt, without what ended it; `first` is the number of the first."""
        stops = [stop for stop in (*until, self._end_text) if stop]
        if sampling not in self._generators:
            vocabulary = self._tokens.size if self._tokens.files else START
            self._generators[sampling] = Generator(
                self._layout, self._variables, sampling, self._tokens.end, vocabulary,
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
        # The whole is decoded again, as HFLM does: some tokenizers drop a space in front of it.
        texts = [self._tokens.decode(tokens) for tokens in written]
        for stop in stops:
            texts = [text.split(stop)[0] for text in texts]
        return texts


def _asked(arguments: dict[str, Any]) -> tuple[Sampling, int, tuple[str, ...]]:
    """(sampling, most tokens, strings that end it) of a task's generation_kwargs."""
    given = dict(normalize_gen_kwargs(arguments, ANSWER))
    most, until = given.pop("max_gen_toks"), tuple(given.pop("until"))
    sampled = given.pop("do_sample", False)
    names = {"temperature": 0.0, "top_k": 0, "top_p": 1.0}
    chosen = {name: given.pop(name, default) for name, default in names.items()}
    if others := {name for name, value in given.items() if (name, value) != ("num_beams", 1)}:
        raise UserError(
            f"a task wants {min(others)}={given[min(others)]} in its generation_kwargs, which is not "
            f"implemented; its answers can have {', '.join(('until', 'max_gen_toks', *names))}"
        )
    return Sampling(**chosen) if sampled else Sampling(), most, until

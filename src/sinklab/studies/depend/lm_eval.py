"""lm-evaluation-harness under a cache policy: a model class whose every score, multiple choice too, is read through the cache.

The harness scores multiple choice with one forward over context and continuation and no cache, so that a policy given to its
own model class changes nothing and says nothing. Here every request goes through a :class:`~sinklab.streaming.reader.Reader`.

    import lm_eval
    from sinklab.studies.depend.lm_eval import PolicyLM

    lm = PolicyLM("org/model", {"name": "sink_window", "num_sinks": 4, "window": 1020})
    results = lm_eval.simple_evaluate(lm, tasks=["arc_easy"])
    results["config"]["policy"], results["config"]["bos"]
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, groupby, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicLayer

from sinklab.errors import ConfigurationError, InputError
from sinklab.models.loading import LoadedModel, opened
from sinklab.models.losses import LogitMap, without_logits
from sinklab.policies.base import PolicySpec, SlotPolicy
from sinklab.policies.full import Full
from sinklab.policies.window import Window
from sinklab.registry import policies
from sinklab.streaming.base import Reader
from sinklab.streaming.cache import PolicyCache
from sinklab.streaming.layer import SlotLayer
from sinklab.streaming.reader import CacheReader, open_reader
from sinklab.streaming.table import SlotTable
from sinklab.streaming.traits import has_states, tokens_in_front, tokens_of_prefix

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance
    from transformers import PreTrainedTokenizerBase

try:
    import datasets
    import lm_eval.api.task as harness_task
    from lm_eval import evaluate
    from lm_eval.api.model import TemplateLM
    from lm_eval.tasks import TaskManager
except ImportError as error:
    raise InputError(
        f"lm-evaluation-harness cannot be imported ({error}); install it with: pip install 'sinklab[evaluation]'"
    ) from error

_HARNESS = (datasets, evaluate, harness_task, TaskManager)
"""Taken from here by :mod:`~sinklab.studies.depend.harness`, so that there is one place that says how to install it."""

MAX_NEW_TOKENS = 256

HELD = 2**14
"""Tokens that the rows of one cache hold together, of texts that are read side by side."""

AT_ONCE = 1024
"""Tokens of one forward: enough for products of full speed, and few enough for a word of progress every second or two."""

AHEAD = 4
"""Tokens that texts must share from here on to stay in one row: to part them a little earlier takes fewer forwards."""

LOGITS = 2**25
"""Numbers that the logits of one forward have at most."""


@dataclasses.dataclass(frozen=True)
class _Part:
    """Tokens of request ``owner``: all but the last are read, and those from ``begin`` on are scored."""

    ids: tuple[int, ...]
    begin: int
    owner: int


@dataclasses.dataclass(frozen=True, eq=False)
class _Asked:
    """What a forward gives for tokens that are scored: ``(n, …)`` logits, or states of which a head makes them, each once; for
    every token which of them, the token, and its owner."""

    states: Tensor
    index: Tensor
    targets: Tensor
    owners: list[int]


class PolicyLM(TemplateLM):
    """A model for ``lm_eval.simple_evaluate`` that sees of every text what a policy lets it see.

    ``results["config"]`` tells the policy and, under ``bos``, whether the tokenizer puts the beginning-of-sequence token in
    front and how many requests began with how many of them: it decides scores (PR #1465 of the harness: Gemma-7B on LAMBADA,
    perplexity 5.9e9 without and 3.46 with). Texts are never cut, however long: a bounded policy needs no limit.

    Args:
        model: a name for :func:`sinklab.load_model`, a loaded model, or a transformers model, then with ``tokenizer``.
        policy: the object, its name, or ``{"name": …, setting: …}``.
        bos: how many beginning-of-sequence tokens every text begins with; by default what the tokenizer puts there.
        batch_size: prompts read side by side, padded on the left, to generate.
        chunk: most tokens that the cache takes at once; results do not depend on it.
        progress: called with the tokens (or texts) of a batch of requests that are read, and how many there are.
        beginnings: shared by all policies of this model, to read the first tokens of the same texts once.
    """

    def __init__(
        self,
        model: str | LoadedModel | PreTrainedModel,
        policy: PolicySpec,
        *,
        bos: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        batch_size: int = 8,
        chunk: int = 256,
        progress: Callable[[int, int], None] = lambda done, total: None,
        beginnings: Beginnings | None = None,
    ) -> None:
        super().__init__()
        loaded = opened(model)
        chosen = loaded.tokenizer if tokenizer is None else tokenizer
        if chosen is None:
            raise InputError(
                "the tasks of lm-evaluation-harness are texts and this model has no tokenizer; give PolicyLM(tokenizer=…)"
            )
        if batch_size < 1:
            raise ConfigurationError(f"batch_size {batch_size} must be 1 or more")
        if bos is not None and (bos < 0 or (bos and chosen.bos_token_id is None)):
            raise ConfigurationError(
                f"bos {bos} must be 0 or more, and 0 for a tokenizer without a beginning-of-sequence token"
            )
        self.tokenizer: PreTrainedTokenizerBase = chosen
        self.bos = bos
        self.model, self.name, self.batch_size, self.chunk = loaded.model, loaded.name, batch_size, chunk
        self.policy = open_reader(self.model, policy, chunk=chunk).policy
        self.progress, self.beginnings = progress, beginnings
        self._device = loaded.device
        # Nothing but what a window shows reaches a token: no learned tokens in front, and no state beside the cache.
        self._sees_windows_only = not (tokens_in_front(self.model) or tokens_of_prefix(self.model) or has_states(self.model))
        self._bos_counts: collections.Counter[int] = collections.Counter()

    # --- the tokenizer -------------------------------------------------------------------------------------------------------

    @property
    def eot_token_id(self) -> int | None:
        """The end-of-text token, at which a continuation ends; ``None`` of a tokenizer without one, whose do not."""
        end = self.tokenizer.eos_token_id
        return None if end is None else int(end)

    @property
    def prefix_token_id(self) -> int:
        """What stands before a text that has nothing before it: the beginning-of-sequence token, or the end-of-text token."""
        begin = self.eot_token_id if self.tokenizer.bos_token_id is None else int(self.tokenizer.bos_token_id)
        if begin is None:
            raise InputError(
                f"the tokenizer of {self.name} has no beginning-of-sequence and no end-of-text token to put before a text that "
                "has nothing before it; set its bos_token"
            )
        return begin

    @property
    def tokenizer_name(self) -> str:
        """For the fingerprints of the harness."""
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_options: object) -> list[int]:
        """Ids of a text; special tokens as the tokenizer puts them, but none before a text that begins with BOS."""
        bos = self.tokenizer.bos_token
        if add_special_tokens is None:
            add_special_tokens = not (bos and string.startswith(bos))
        return list(self.tokenizer.encode(string, add_special_tokens=add_special_tokens))

    def fronted(self, ids: list[int]) -> list[int]:
        """A text that begins with as many beginning-of-sequence tokens as asked for.

        A text that has no other token keeps one of them (or of end-of-text), since what follows must have something before it.
        """
        if self.bos is not None and self.tokenizer.bos_token_id is not None:
            bos = int(self.tokenizer.bos_token_id)
            first = next((index for index, token in enumerate(ids) if token != bos), len(ids))
            ids = [bos] * self.bos + ids[first:]
        return ids or [self.prefix_token_id]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """The conversation as one text, by the tokenizer's template."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    # --- what the harness asks -----------------------------------------------------------------------------------------------

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[object, list[int], list[int]]], disable_tqdm: bool = False, **_options: object
    ) -> list[tuple[float, bool]]:
        """Log-likelihood of every continuation and whether greedy decoding would give it."""
        for text, _, continuation in requests:
            if not continuation:
                raise InputError(
                    f"the continuation of {text!r} has no token of its own: the tokenizer joins it to the context; begin it "
                    "with a blank"
                )
        texts = [(self.fronted(context), continuation) for _, context, continuation in requests]
        self._count_bos([context + continuation for context, continuation in texts])
        answers = self._answers(texts)
        for (text, _, _), answer in zip(requests, answers, strict=True):
            if text is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)
        return answers

    def loglikelihood(self, requests: Sequence[Instance], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        """Log-likelihood of every continuation and whether greedy decoding would give it; without a bar of its own."""
        answers: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        return answers

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each read in one stream; the token in front is not put there twice."""
        texts = []
        for (string,) in (request.args for request in requests):
            ids = self.tok_encode(string)
            texts.append((ids[:1], ids[1:]) if ids[:1] == [self.prefix_token_id] else ([self.prefix_token_id], ids))
        scored = iter(self._loglikelihood_tokens([(None, *text) for text in texts if text[1]]))
        totals = [next(scored)[0] if text[1] else 0.0 for text in texts]  # of an empty text nothing is to be predicted
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Greedy continuations, cut before the first stop text."""
        prompts = [self.fronted(self.tok_encode(request.args[0])) for request in requests]
        self._count_bos(prompts)
        texts: dict[int, str] = {}
        for batch in self._batches(prompts):
            settings = [read_greedy(requests[index].args[1]) for index in batch]
            for index, text in zip(batch, self._generate([prompts[index] for index in batch], settings), strict=True):
                texts[index] = text
                self.progress(len(texts), len(prompts))
                self.cache_hook.add_partial("generate_until", requests[index].args, text)
        return [texts[index] for index in range(len(requests))]

    def get_model_info(self) -> dict[str, object]:
        """What the harness writes into ``results["config"]``."""
        return {
            "sinklab_model": self.name,
            "policy": policies.settings(self.policy),
            "policy_text": self.policy.describe(),
            "bos": self.bos_record(),
            "model_dtype": str(self.model.dtype),
        }

    def bos_record(self) -> dict[str, object]:
        """Whether the tokenizer puts the beginning-of-sequence token in front, and texts read by how many they began with."""
        bos = self.tokenizer.bos_token_id
        return {
            "token": self.tokenizer.bos_token,
            "added_by_tokenizer": bos is not None and self.tokenizer.encode("a")[:1] == [bos],
            "texts_by_count": {str(count): number for count, number in sorted(self._bos_counts.items())},
        }

    # --- through the cache ---------------------------------------------------------------------------------------------------

    def _count_bos(self, texts: Sequence[list[int]]) -> None:
        bos = self.tokenizer.bos_token_id
        for ids in texts:
            self._bos_counts[next((n for n, token in enumerate(ids) if token != bos), len(ids))] += 1

    def _batches(self, texts: Sequence[list[int]]) -> Iterator[list[int]]:
        """Indices of texts of about the same length, the longest first, so that too little memory shows at once."""
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        yield from (order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size))

    def _answers(self, texts: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Of contexts and continuations, each read from its beginning to its end.

        Where the cache can be shared, each beginning that several texts have is read once: a tree whose branches are rows.
        """
        reader = open_reader(self.model, self.policy, chunk=self.chunk)
        parts = sorted((self._part(*text, owner) for owner, text in enumerate(texts)), key=lambda part: part.ids)
        common, beginnings = [0] * len(parts), None
        groups: Iterable[list[_Part]] = ([part] for part in parts)
        if isinstance(reader, CacheReader) and reader.forks:
            common[1:] = [_common(one.ids[:-1], two.ids[:-1]) for one, two in pairwise(parts)]
            groups = _groups(parts, common, [reader.policy.max_held(len(part.ids)) for part in parts])
            beginnings = self.beginnings
        total = sum(len(part.ids) - 1 - shared for part, shared in zip(parts, common, strict=True))
        totals, greedy, done = [0.0] * len(texts), [True] * len(texts), 0
        waiting: list[_Asked] = []

        def settle() -> None:
            for owner, right, best in _scores(waiting, head):
                totals[owner] += right
                greedy[owner] &= best
            waiting.clear()

        with without_logits(self.model) as head:
            for group in groups:
                rows, column = beginnings.begin(reader, group, parts) if beginnings else ([group], 0)
                done += column * len(rows)
                for tokens, asked in _read_tree(reader, rows, column, head):
                    done += tokens
                    self.progress(min(done, total), total)
                    waiting += asked
                    # A head is given the states of many forwards: its product is slow on few.
                    if head is None or sum(len(one.states) for one in waiting) >= AT_ONCE:
                        settle()
                reader.reset()
            settle()
        return list(zip(totals, greedy, strict=True))

    def _part(self, context: list[int], continuation: list[int], owner: int) -> _Part:
        """What is to be read for one text: as much as its scores depend on."""
        ids, policy, query = (*context, *continuation), self.policy, len(context) - 1
        first = 0
        if isinstance(policy, Window) and self._sees_windows_only:
            # A layer looks one window farther back than the one above it.
            first = max(0, query - policy.window * int(self.model.config.get_text_config().num_hidden_layers))
        return _Part(ids[first:], query + 1 - first, owner)

    def _begin(self, texts: Sequence[list[int]]) -> tuple[Reader, Tensor, Tensor | None]:
        """A reader at its beginning, and the texts padded on the left, with their mask."""
        length = max(map(len, texts))
        padding = self.eot_token_id or 0  # which the mask hides
        tokens = torch.tensor([[padding] * (length - len(text)) + text for text in texts], device=self.device)
        mask = torch.tensor([[0] * (length - len(text)) + [1] * len(text) for text in texts], device=self.device)
        reader = open_reader(self.model, self.policy, chunk=self.chunk)
        return reader, tokens, None if bool(mask.all()) else mask

    def _generate(self, prompts: list[list[int]], settings: list[tuple[list[str], int]]) -> list[str]:
        reader, tokens, mask = self._begin(prompts)
        logits = reader.read(tokens, mask, keep=1)
        written: list[list[int]] = [[] for _ in prompts]
        texts: list[str | None] = [None] * len(prompts)
        while True:
            chosen = logits[:, -1].argmax(dim=-1)
            for row, token in enumerate(chosen.tolist()):
                if texts[row] is None:
                    texts[row] = self._ended(written[row], token, *settings[row])
            if all(text is not None for text in texts):
                return [str(text) for text in texts]
            logits = reader.read(chosen[:, None], None if mask is None else torch.ones_like(chosen)[:, None], keep=1)

    def _ended(self, written: list[int], token: int, stops: list[str], limit: int) -> str | None:
        """The text if it ends with this token, else ``None``; ``written`` grows."""
        if token == self.eot_token_id:
            return _cut(self.tokenizer.decode(written, skip_special_tokens=True), stops)
        written.append(token)
        text = self.tokenizer.decode(written, skip_special_tokens=True)
        return _cut(text, stops) if len(written) == limit or any(stop in text for stop in stops) else None


class Beginnings:
    """Keys and values of the first tokens of texts, read once for all policies that see everything there."""

    def __init__(self, length: int) -> None:
        self.length = length
        self._held: dict[tuple[int, ...], list[tuple[Tensor, Tensor]]] = {}

    def begin(self, reader: Reader, parts: list[_Part], ahead: Sequence[_Part] = ()) -> tuple[list[list[_Part]], int]:
        """Rows of the reader's cache and the tokens that it holds of each; none where they cannot be shared.

        Those of parts ``ahead`` are read with them.
        """
        length = self.length
        if not isinstance(reader, CacheReader) or min(part.begin for part in parts) <= length or not self._fits(reader):
            return [parts], 0
        rows = [list(members) for _, members in groupby(parts, lambda part: part.ids[:length])]
        texts = [row[0].ids[:length] for row in rows]
        wanted = {*texts, *(part.ids[:length] for part in ahead if part.begin > length)}
        unread = [_Part((*text, 0), length + 1, 0) for text in sorted(wanted - self._held.keys())]
        side_by_side = max(1, AT_ONCE // length)
        for start in range(0, len(unread), side_by_side):
            some = unread[start : start + side_by_side]
            full = open_reader(reader.model, Full())
            assert isinstance(full, CacheReader)
            collections.deque(_read_tree(full, [some]), maxlen=0)
            layers = [layer for layer in full.cache.layers if isinstance(layer, DynamicLayer) and layer.keys.shape[2] == length]
            if len(layers) < len(full.cache.layers):  # of another kind
                return [parts], 0
            for row, part in enumerate(some):
                self._held[part.ids[:-1]] = [(layer.keys[row], layer.values[row]) for layer in layers]
        together = [
            (torch.stack([keys for keys, _ in layer]), torch.stack([values for _, values in layer]))
            for layer in zip(*(self._held[text] for text in texts), strict=True)
        ]
        reader.take_over(torch.tensor(texts, device=reader.model.device), together)
        return rows, length

    def _fits(self, reader: CacheReader) -> bool:
        """Whether a policy shows all of the first tokens, in slots that hold what other caches hold."""
        cache, policy = reader.cache, reader.policy
        if not isinstance(cache, PolicyCache):
            return isinstance(policy, Full)
        tokens = torch.arange(self.length)
        return (
            type(cache.table) is SlotTable
            and all(type(layer) is SlotLayer for layer in cache.layers)
            and isinstance(policy, SlotPolicy)
            and policy.num_slots > self.length
            and bool((policy.visible(tokens[:, None], tokens) == (tokens[:, None] >= tokens)).all())
        )


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens at the beginning that two texts share."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))


def _groups(parts: list[_Part], common: Sequence[int], held: Sequence[int]) -> Iterator[list[_Part]]:
    """Sorted parts of which a cache holds :data:`HELD` tokens at most, cut where neighbours share least."""
    start = 0
    while start < len(parts):
        stop, together = start, 0
        while stop < len(parts) and (stop == start or together + held[stop] <= HELD):
            together, stop = together + held[stop], stop + 1
        if stop < len(parts):
            stop = min(range(start + (stop - start + 1) // 2, stop + 1), key=lambda cut: common[cut])
        yield parts[start:stop]
        start = stop


def _read_tree(
    reader: Reader, rows: list[list[_Part]], column: int = 0, head: LogitMap | None = None
) -> Iterator[tuple[int, list[_Asked]]]:
    """Read sorted parts together, a row of the cache for each beginning that differs; after each forward its tokens, and what
    it gives for those that are scored.
    """
    device, vocabulary = reader.model.device, reader.model.config.get_text_config().vocab_size if head is None else 1
    while True:
        going_on = [[part for part in members if len(part.ids) - 1 > column] for members in rows]
        ahead = slice(column, column + AHEAD)
        branches = [
            (row, list(branch))
            for row, members in enumerate(going_on)
            for _, branch in groupby(members, lambda part, ahead=ahead: part.ids[:-1][ahead])  # type: ignore[misc]
        ]
        if not branches:
            return
        parents = [row for row, _ in branches]
        if column and parents != list(range(len(rows))):
            assert isinstance(reader, CacheReader), "others are given one text at a time"
            reader.cache.reorder_cache(torch.tensor(parents, device=device))
        rows = [branch for _, branch in branches]
        # Sorted texts agree as far as the first and the last of them do.
        stop = column + min(_common(row[0].ids[column:-1], row[-1].ids[column:-1]) for row in rows)
        stop = min(stop, column + max(1, AT_ONCE // len(rows)))
        scored = max(column, min(part.begin for row in rows for part in row) - 1)
        if scored < stop:
            stop = min(stop, scored + max(1, LOGITS // (len(rows) * vocabulary)))
        tokens = torch.tensor([row[0].ids[column:stop] for row in rows], device=device)
        logits = reader.read(tokens, keep=max(1, stop - scored))
        asked = [
            (index, at, part.ids[at + 1], part.owner)
            for index, row in enumerate(rows)
            for part in row
            for at in range(max(scored, part.begin - 1), stop)
        ]
        given: list[_Asked] = []
        if asked:
            index, at, target, owners = (list(one) for one in zip(*asked, strict=True))
            places = torch.tensor([index, at], device=device) - torch.tensor([[0], [scored]], device=device)
            once, back = torch.unique(places, dim=1, return_inverse=True)  # several texts share some
            given = [_Asked(logits[tuple(once)], back, torch.tensor(target, device=device), owners)]
        column = stop
        yield tokens.numel(), given


def _scores(asked: list[_Asked], head: LogitMap | None) -> Iterator[tuple[int, float, bool]]:
    """Of every token that was scored the owner, its log-likelihood, and whether it was the likeliest."""
    if not asked:
        return
    starts = accumulate((len(one.states) for one in asked), initial=0)
    states = torch.cat([one.states for one in asked])
    index = torch.cat([one.index + start for one, start in zip(asked, starts, strict=False)])
    targets = torch.cat([one.targets for one in asked])
    if head is None:
        logits = states.float()
        right = logits[index, targets].double() - logits.logsumexp(dim=-1).double()[index]
        likeliest = logits.argmax(dim=-1)
    else:
        likeliest = torch.zeros(len(states), dtype=torch.int64, device=states.device)
        sums = head.log_sum_exp(states, likeliest)
        right = (head.of(states[index], targets) - sums[index]).clamp_max(0.0).double()
    owners = [owner for one in asked for owner in one.owners]
    yield from zip(owners, right.tolist(), (likeliest[index] == targets).tolist(), strict=True)


def _cut(text: str, stops: Iterable[str]) -> str:
    """The text before the first stop text."""
    return text[: min((text.find(stop) for stop in stops if stop in text), default=len(text))]


def read_greedy(settings: dict[str, Any]) -> tuple[list[str], int]:
    """Stop texts and most new tokens of a request."""
    if settings.get("do_sample") or float(settings.get("temperature") or 0.0) > 0.0 or int(settings.get("num_beams") or 1) > 1:
        raise ConfigurationError(
            f"PolicyLM decodes greedily; this task asks for {settings}; set do_sample: false, temperature: 0"
        )
    until = settings.get("until") or []
    stops = [until] if isinstance(until, str) else list(until)
    limit = settings.get("max_gen_toks") or settings.get("max_new_tokens") or MAX_NEW_TOKENS
    return [stop for stop in stops if stop], int(limit)

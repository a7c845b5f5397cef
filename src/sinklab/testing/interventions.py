"""The contract of interventions."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn

from sinklab.attention.call import AttentionCall, LayerOutput, Statistics
from sinklab.attention.host_arguments import cache_argument, returned_cache
from sinklab.attention.intervention import HeadIntervention, Heads, HiddenIntervention, Intervention
from sinklab.attention.probe import Watcher
from sinklab.attention.session import attend
from sinklab.errors import ConfigurationError, ContractError, SinklabError, UnsupportedModelError, first_line
from sinklab.registry import interventions
from sinklab.testing._checks import Checks, tiny_sinklm
from sinklab.testing.probes import padded, tiny_models

_ROUNDING = 1e-9
"""Float64 models of two layers, except that angles of rotary embeddings are float32 and the same in both."""

Inputs = dict[str, Tensor]
Edits = list[Intervention]


def check_intervention(intervention_class: type[Intervention], **settings: object) -> None:
    """Check that an intervention does what it says, and nothing else, and nothing any more once the session is over.

    It runs on the models of :func:`tiny_models` and on two more with a null score and without normalisation; a model that it
    refuses with :class:`UnsupportedModelError` is passed over, but not all of them. The checks:

    - *declaration*: a registered frozen dataclass with a version, whose ``neutral`` settings say that they change nothing;
    - *neutral*: with these, outputs are bit-identical;
    - *shapes*: every stage gives back what it was given in the same shape;
    - *effect*: with ``settings`` they are not;
    - *restored*: bit-identical after the session, also after an exception in the block or in the middle of a forward;
    - *other heads*: heads of the same layer that are not named keep their bits;
    - *one by one*: heads edited each by an intervention of its own, as by one for all of them;
    - *blocks*: the rows of weights one at a time, as all at once;
    - *grouped queries*: shared keys and values as repeated ones;
    - *batch split*, *left padding*: samples one at a time, as together (where it is ``per_sample``);
    - *cached decoding*: token by token as in one pass;
    - *other architectures*: BERT, T5 and ViT keep their bits under neutral settings; the others work or are refused.

    Args:
        intervention_class: a concrete subclass of one of the two kinds.
        settings: what to check it with; its ``example`` where they leave something open.

    Raises:
        ContractError: a check failed.
    """
    checks = Checks(f"intervention {getattr(intervention_class, 'name', intervention_class.__name__)!r}")
    _check_declaration(checks, intervention_class)
    example = intervention_class(**{**intervention_class.example, **settings})
    neutral = intervention_class(**intervention_class.neutral)
    served = []
    for name, model in _decoders().items():
        checked = _Decoder(checks, name, model, example)
        _check_neutral(checks, name, model, neutral, checked.batch)
        try:
            checked.run_watched()
        except UnsupportedModelError:
            continue
        served.append(name)
        checked.check()
    checks.require(bool(served), "effect", f"one of {', '.join(_decoders())} that can be edited so", "none")
    for name, (model, inputs) in _others().items():
        _check_neutral(checks, name, model, neutral, inputs)
        clean = _outputs(model, inputs, [])
        try:
            _outputs(model, inputs, [example])
        except SinklabError as error:
            refused = isinstance(error, (UnsupportedModelError, ConfigurationError))
            checks.require(refused, f"other architectures ({name})", "outputs or a refusal", first_line(error))
        same = torch.equal(_outputs(model, inputs, []), clean)
        checks.require(same, f"other architectures ({name})", "bit-identical outputs afterwards", "others")


def _check_declaration(checks: Checks, cls: type[Intervention]) -> None:
    kinds = (HeadIntervention, HiddenIntervention)
    checks.require(issubclass(cls, kinds), "declaration", "one of the two kinds", cls.__mro__[1].__name__)
    parameters = getattr(cls, "__dataclass_params__", None)
    checks.require(bool(parameters and parameters.frozen), "declaration", "a frozen dataclass", cls)
    name = getattr(cls, "name", None)
    registered = isinstance(name, str) and name in interventions and interventions[name] is cls
    checks.require(registered, "declaration", "a registered name", repr(name))
    checks.require(isinstance(cls.version, int) and cls.version >= 1, "declaration", "a version from 1", cls.version)
    try:
        idle = cls(**cls.neutral).changes_nothing
        busy = not cls(**cls.example).changes_nothing
    except (TypeError, SinklabError) as error:
        raise ContractError(f"{checks.subject} breaks its contract, check 'declaration': {first_line(error)}") from error
    checks.require(idle, "declaration", "changes_nothing under the neutral settings", cls.neutral)
    checks.require(busy, "declaration", "something that changes under the example settings", cls.example)


def _check_neutral(checks: Checks, name: str, model: nn.Module, neutral: Intervention, inputs: Inputs) -> None:
    changed = int((_outputs(model, inputs, [neutral]) != _outputs(model, inputs, [])).sum())
    checks.require(changed == 0, f"neutral ({name})", "bit-identical outputs", f"{changed} different numbers")


class _Decoder:
    """The checks on one decoder."""

    def __init__(self, checks: Checks, name: str, model: nn.Module, example: Intervention) -> None:
        self.checks, self.name, self.model, self.example = checks, name, model, example
        tokens = torch.randint(1, 40, (3, 8), generator=torch.Generator().manual_seed(0))
        self.batch: Inputs = {"input_ids": tokens}

    def edits(self, start: int = 0, stop: int | None = None, heads: Heads | None = None) -> Edits:
        """The intervention for some samples, and for some heads if it is about heads."""
        if not isinstance(self.example, HeadIntervention):
            return [self.example]
        edit = self.example.of_samples(start, len(self.batch["input_ids"]) if stop is None else stop)
        return [edit if heads is None else dataclasses.replace(edit, heads=heads)]

    def run(self, inputs: Inputs, edits: Edits | None = None) -> Tensor:
        return _outputs(self.model, inputs, self.edits() if edits is None else edits)

    def label(self, check: str) -> str:
        return f"{check} ({self.name})"

    def run_watched(self) -> None:
        """One run, with a look at the shape of everything that a stage gives back."""
        cls = type(self.example)

        def watched(stage: str) -> Callable[..., object]:
            original: Callable[..., object] = getattr(cls, stage)

            def method(edit: Intervention, *given: object) -> object:
                result = original(edit, *given)
                for what, expected, got in _shapes(stage, given, result):
                    self.checks.require(got == expected, self.label("shapes"), f"{what} {expected} from {stage}", got)
                return result

            return method

        with contextlib.ExitStack() as patches:
            for stage in ("edit_call", "edit_weights", "edit_outputs", "edit_hidden"):
                if hasattr(cls, stage) and getattr(cls, stage) is not getattr(HeadIntervention, stage, None):
                    patches.enter_context(mock.patch.object(cls, stage, watched(stage)))
            self.run(self.batch)

    def check(self) -> None:
        clean, edited = self.run(self.batch, []), self.run(self.batch)
        self.checks.require(
            not torch.equal(clean, edited), self.label("effect"), "other outputs under the settings", "the same bits"
        )
        self._check_restored(clean)
        if isinstance(self.example, HeadIntervention):
            self._check_heads(edited)
        if self.example.per_sample:
            self._check_samples(edited)
        self._check_decoding(edited)

    def _check_restored(self, clean: Tensor) -> None:
        for where, model_fails in (("block", False), ("forward", True)):
            try:
                with torch.no_grad(), attend(self.model, interventions=[*self.edits(), *([_Bomb()] if model_fails else [])]):
                    self.model(**self.batch)
                    raise _Stop
            except _Stop:
                pass
            same = torch.equal(self.run(self.batch, []), clean)
            expected = f"bit-identical outputs after an exception in the {where}"
            self.checks.require(same, self.label("restored"), expected, "others")

    def _check_heads(self, edited: Tensor) -> None:
        checks, every = self.checks, range(4)
        clean = self._head_outputs([])
        touched = self._head_outputs(self.edits(heads={1: (1, 2)}))
        others = torch.equal(touched[0], clean[0]) and torch.equal(touched[1][:, :, [0, 3]], clean[1][:, :, [0, 3]])
        checks.require(others, self.label("other heads"), "bit-identical outputs of heads that are not named", "others")
        apart = [edit for head in every for edit in self.edits(heads={0: (head,), 1: (head,)})]
        checks.close(self.run(self.batch, apart), edited, _ROUNDING, self.label("one by one"), "outputs")
        with mock.patch("sinklab.attention.call.SCORES_AT_ONCE", 1):
            checks.close(self.run(self.batch), edited, _ROUNDING, self.label("blocks"), "outputs")
        if self.name == "llama":
            repeated = _outputs(_ungrouped(self.model), self.batch, self.edits())
            checks.close(repeated, edited, _ROUNDING, "grouped queries", "outputs with repeated keys and values")

    def _check_samples(self, edited: Tensor) -> None:
        tokens, lengths = self.batch["input_ids"], (8, 6, 4)
        rows = self.run(padded([tokens[row : row + 1, :length] for row, length in enumerate(lengths)], "left"))
        for sample, length in enumerate(lengths):
            own, edits = tokens[sample : sample + 1], self.edits(sample, sample + 1)
            alone = self.run({"input_ids": own}, edits)[0]
            self.checks.close(alone, edited[sample], _ROUNDING, self.label("batch split"), "outputs of a sample")
            mask = torch.ones_like(own[:, :length])
            short = self.run({"input_ids": own[:, :length], "attention_mask": mask, "position_ids": mask.cumsum(1) - 1}, edits)[
                0
            ]
            unpadded = rows[sample][-len(short) :]
            self.checks.close(unpadded, short, _ROUNDING, self.label("left padding"), "outputs of a sample")

    def _check_decoding(self, edited: Tensor) -> None:
        """Three tokens first, then one at a time, in one session."""
        pieces, cache = [], None
        with torch.no_grad(), attend(self.model, interventions=self.edits()):
            for piece in self.batch["input_ids"].split([3, 1, 1, 1, 2], dim=1):
                step = self.model(input_ids=piece, **cache_argument(self.model, cache), use_cache=True)
                cache = returned_cache(step)
                pieces.append(step.logits)
        self.checks.close(torch.cat(pieces, dim=1), edited, _ROUNDING, self.label("cached decoding"), "outputs in pieces")

    def _head_outputs(self, edits: Edits) -> list[Tensor]:
        spy = _Spy()
        with torch.no_grad(), attend(self.model, [spy], edits):
            self.model(**self.batch)
        return spy.outputs


def _shapes(stage: str, given: tuple[object, ...], result: object) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...]]]:
    """What a stage gave back: its name, the shape that it was given in, and the one that it has now."""
    match given, result:
        case (AttentionCall() as call,), AttentionCall() as edited:
            for name in ("queries", "keys", "values"):
                yield name, tuple(getattr(call, name).shape), tuple(getattr(edited, name).shape)
        case (AttentionCall(), Tensor() as weights, Tensor() as mass, _, _), (Tensor() as new_weights, Tensor() as new_mass):
            yield "weights", tuple(weights.shape), tuple(new_weights.shape)
            yield "null mass", tuple(mass.shape), tuple(new_mass.shape)
        case (AttentionCall(), Tensor() as outputs), Tensor() as new_outputs:
            yield "outputs", tuple(outputs.shape), tuple(new_outputs.shape)
        case (LayerOutput() as layer,), Tensor() as hidden:
            yield "hidden states", tuple(layer.hidden_states.shape), tuple(hidden.shape)
        case _:
            raise ContractError(f"{stage} gave {type(result).__name__}, which is not what it must give")


class _Stop(Exception):
    """What the check itself raises."""


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class _Bomb(HeadIntervention):
    """Raises in the second layer."""

    def edit_outputs(self, call: AttentionCall, outputs: Tensor) -> Tensor:
        if call.site.layer == 1:
            raise _Stop
        return outputs


class _Spy(Watcher):
    """Keeps the head outputs that the model goes on with."""

    name, needs = "spy", frozenset()

    def __init__(self) -> None:
        self.outputs: list[Tensor] = []

    def update(self, call: AttentionCall, statistics: Statistics) -> None:
        assert call.head_outputs is not None
        self.outputs.append(call.head_outputs.clone())


def _outputs(model: nn.Module, inputs: Inputs, edits: Edits) -> Tensor:
    """Logits or last hidden states."""
    run: Callable[..., Any] = model
    with torch.no_grad():
        if not edits:
            result = run(**inputs)
        else:
            # What the edits begin from is proved in sessions of users; here it would be proved a hundred times.
            with attend(model, interventions=edits, verify=False):
                result = run(**inputs)
    outputs: Tensor = result.logits if hasattr(result, "logits") else result.last_hidden_state
    return outputs


def _ungrouped(model: transformers.PreTrainedModel) -> nn.Module:
    """The Llama of :func:`tiny_models` with keys and values of its own for every query head."""
    config = transformers.LlamaConfig(**{**model.config.to_dict(), "num_key_value_heads": 4})
    other = transformers.LlamaForCausalLM(config).double().eval()
    weights = {
        name: value.unflatten(0, (2, 8)).repeat_interleave(2, dim=0).flatten(0, 1)
        if name.endswith(("k_proj.weight", "v_proj.weight"))
        else value
        for name, value in model.state_dict().items()
    }
    other.load_state_dict(weights)
    return other


def _decoders() -> dict[str, nn.Module]:
    """Those of :func:`tiny_models`, one with a sink logit and one with sigmoid attention."""
    return tiny_models() | {name: tiny_sinklm({"name": name}) for name in ("sink_logit", "sigmoid")}


def _others() -> dict[str, tuple[nn.Module, Inputs]]:
    """An encoder, an encoder–decoder and a vision model, each with something to run on."""
    tokens = torch.randint(1, 40, (2, 7), generator=torch.Generator().manual_seed(1))
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    configs = {
        "bert": (transformers.BertConfig(vocab_size=50, **shape), {"input_ids": tokens}),
        "t5": (
            transformers.T5Config(vocab_size=50, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4),
            {"input_ids": tokens, "decoder_input_ids": tokens[:, :5]},
        ),
        "vit": (
            transformers.ViTConfig(image_size=12, patch_size=4, **shape),
            {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(1))},
        ),
    }
    models: dict[str, tuple[nn.Module, Inputs]] = {}
    for name, (config, inputs) in configs.items():
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            models[name] = (transformers.AutoModel.from_config(config).eval(), inputs)
    return models

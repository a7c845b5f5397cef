"""Reading one call: from what the host hands to its attention function to an :class:`AttentionCall`."""

from __future__ import annotations

from torch import Tensor, nn

from sinklab.attention import host_arguments, seam
from sinklab.attention.call import AttentionCall, Site
from sinklab.attention.forward import Forward
from sinklab.attention.positions import read_positions
from sinklab.attention.state import state_of
from sinklab.errors import UnsupportedModelError

__all__ = ["describe_call"]


def describe_call(
    native: seam.Native,
    module: nn.Module,
    site: Site,
    tensors: tuple[Tensor, Tensor, Tensor, object, Tensor, Tensor | None],
    kwargs: host_arguments.Keywords,
    forward: Forward,
) -> AttentionCall:
    """The call that a module has just made, with nothing that only some probes need (``residual``, ``projection``).

    Args:
        native: the function that it called.
        tensors: queries, keys, values and mask as the function received them, its head outputs ``(batch, q_len, num_heads,
            value_dim)``, and its log-sum-exp where the kernel gave one.
        kwargs: the other keyword arguments of the function.
        forward: what has been learned of the forward that the call is part of.

    Raises:
        UnsupportedModelError: keys that are not there yet or may have been dropped unseen, or a mask of a kind that cannot be
            read.
    """
    if kwargs.get("cache") is not None:
        raise UnsupportedModelError(
            f"{site.module}: a paged cache fills the keys inside the kernel; measure without continuous batching"
        )
    query, key, value, mask, outputs, log_sum_exp = tensors
    query, key, value, outputs = query.detach(), key.detach(), value.detach(), outputs.detach()
    batch, num_heads, q_len, head_dim = query.shape
    kv_len = key.shape[2]
    implementation = getattr(native, "__name__", "")
    record = forward.record_of(mask, q_len, kv_len)
    left_to_kernel = record is not None and record.mask is None
    visible, bias = host_arguments.read_mask(
        mask, kwargs, module, implementation, q_len, kv_len, query.device, left_to_kernel=left_to_kernel
    )
    decoded = forward.decoded(q_len)
    known_before = record.q_offset if record is not None else forward.goes_on_from
    held, window = kv_len - q_len, kwargs.get("sliding_window")
    if record is None and site.kind == "self" and window is not None and held >= max(window - 1, 1):
        # DiffusionGemma: a canvas behind a prompt, of which a sliding layer holds the end.
        raise UnsupportedModelError(
            f"{site.module} has {held:,} keys from before the call under a window of {window:,}, and the model built no mask "
            "that says which ones it has dropped, so that positions are not known; measure texts of fewer than "
            f"{window - 1:,} tokens in front"
        )
    queries, keys = read_positions(
        record,
        visible,
        batch=batch,
        q_len=q_len,
        kv_len=kv_len,
        cross=site.kind == "cross",
        decoded=decoded,
        cached=forward.cached,
        token_masks=forward.token_masks,
        masked_by_caller=forward.masked_by_caller,
        position_ids=kwargs.get("position_ids") if kwargs.get("position_ids") is not None else forward.position_ids,
        device=query.device,
    )
    scaling = kwargs.get("scaling")
    scaling = head_dim**-0.5 if scaling is None else float(scaling)
    operation = seam.operation_of(module, native)
    state = state_of(module, operation, kwargs.get("layer_input"))
    query, key = operation.features(query, key, state)
    sinks = host_arguments.read_sink_scores(kwargs)
    sinks = operation.null_scores(query, scaling, state) if sinks is None else sinks.to(query.device)
    if log_sum_exp is not None and tuple(log_sum_exp.shape) != (batch, num_heads, q_len):
        # The host folds the groups of a single query into the query axis; the numbers are the same.
        log_sum_exp = log_sum_exp.reshape(batch, num_heads, q_len) if log_sum_exp.numel() == batch * num_heads * q_len else None
    return AttentionCall(
        site=site,
        queries=query,
        keys=key,
        values=value,
        scaling=scaling,
        visible=visible,
        operation=operation,
        query_positions=queries.positions,
        key_positions=keys.positions,
        query_documents=queries.documents,
        key_documents=keys.documents,
        softcap=kwargs.get("softcap"),
        bias=None if bias is None else bias.detach(),
        sink_scores=sinks,
        null_value=operation.null_value(state),
        output_bias=operation.output_bias(state),
        gain=operation.gain(state),
        head_outputs=outputs.reshape(batch, q_len, num_heads, -1),
        log_sum_exp=log_sum_exp,
        key_tokens=(
            forward.source_tokens(keys.positions) if site.kind == "cross" else forward.key_tokens(keys.positions, q_len, record)
        ),
        front=forward.front if site.kind == "self" else 0,
        cached_keys=known_before if site.kind == "self" else kv_len if decoded else 0,
    )

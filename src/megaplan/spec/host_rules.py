"""Rules of the `host` section: keys of another host, and what the named one cannot run."""

from __future__ import annotations

from collections.abc import Iterator

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Severity
from megaplan.spec.context import Checked
from megaplan.spec.host import host_keys

WHY_UNPRICED = {
    "activation_offload": "activations leave the device while a layer runs, as fast as the host's link takes them",
    "cuda_graphs": "graphs keep static inputs, outputs and a memory pool of their own",
    "delayed_wgrad": "inputs and output gradients of delayed weight gradients stay for longer",
    "deferred_embedding_wgrad": "gradients of logits queue up to the end of the step",
    "distillation": "a teacher model stands beside the student",
    "fsdp": "Megatron-FSDP has other buffers unless it shards all, in fp32, which is sharding.reshard_after_forward",
    "layer_wise_param_layout": "its shards are padded by a layout that is not modelled",
}
"""Features whose tensors are not modelled, and what they add."""


def host_rules(checked: Checked) -> Iterator[Diagnostic]:
    """MP901 … MP904."""
    host = checked.spec.host
    own = host_keys(host.name)
    for key in sorted(host.model_fields_set - own):
        other = "megarun" if host.name == "megatron" else "megatron"
        detail = f"host.{key} is a key of host {other}, and host.name = {host.name}"
        yield checked.error("MP901", detail, f"host.{key}", f"remove host.{key}", f"host: {{name: {other}}}")
    if host.name != "megatron" or checked.pattern is None:
        return
    from megaplan.spec.megatron_limits import gpt_limits, megatron_limits  # noqa: PLC0415 (most specs are of megarun)

    spec, letters = checked.spec, checked.pattern.layers
    limits = [*megatron_limits(spec, letters), *(gpt_limits(spec, letters) if host.model == "gpt" else ())]
    for limit in limits:
        if limit.tensors:
            yield checked.error("MP902", limit.detail, limit.key, *([limit.fix] if limit.fix else []))
    for feature in host.features:
        detail = f"host.features has {feature}: {WHY_UNPRICED[feature]}"
        yield checked.error("MP903", detail, "host.features", "plan without it, and measure what it adds")
    otherwise = [limit for limit in limits if not limit.tensors]
    if otherwise:
        said = "\n".join(limit.detail for limit in otherwise)
        yield diagnostic("MP904", said, checked.locate(otherwise[0].key), [limit.fix for limit in otherwise], Severity.NOTE)

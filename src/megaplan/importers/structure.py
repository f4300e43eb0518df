"""Names of foreign fields and arguments that decide the number or size of tensors."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, Severity

_COUNTED = re.compile(
    r"(?:^|_)(?:(?:num|n)_\w*(?:heads?|layers?|experts?|query_groups|tables?|codebooks)"
    r"|(?:hidden|ffn|intermediate|embed(?:ding)?|vocab|expert|latent|inner|head|state)_(?:size|dim|width|rank)"
    r"|(?:q|k|v|kv|qk|rope|nope|ssm|mamba|lora|expert|shared)\w*_(?:dim|rank|heads?)|head_dim|d_(?:model|ff|state|conv|inner))$"
    r"|(?:^|_)conv\d?d?_(?:group|kernel|dim|size|width|channels)"
)
_SWITCHED = re.compile(
    r"(?:^|_)(?:qk_?(?:layer)?norm|add_\w+_bias|(?:qkv|linear|attention|mlp|moe|lm_head|router)_bias|untie\w*|post_norm|swiglu|geglu|mla|sinks?|\w+_gate)$"
)
_PROCESS = re.compile(r"fused|fusion|worker|thread|buffer|bucket|cache|queue|log|batch|wandb|checkpoint|optimizer|loss|lr")


_SHARED = re.compile(r"(?:expert|layer|block|head|weight)s?_(?:pool|shar|tied?|tying|recur|loop)")
"""Names of modes in which layers have parts in common."""


_OWN_SWITCH = re.compile(
    r"(?:^|_)gat(?:e|ed|ing)(?:_|$)|norm(?:s|alization)?$|(?:^|_)(?:attn|attention)_res(?:_|idual)|(?:^|_)(?:short_?conv|canon)"
    r"|^(?:(?:use|add|has|with|enable)_)*(?:(?:attn|attention|qkv|q|k|v|o|out|output|proj|mlp|ffn|linear|norm|head|lm_head|embedding)_)*bias$"
    r"|^(?:use_|is_)?moe$|(?:layer|block|kv|key|value|head|embed\w*)s?_shar(?:ed|ing)$|^share_"
)
_NO_SWITCH = re.compile(
    r"^(?:no|disable|fix|freeze|residual)_|_apply_|(?:expert|correction|logit)_bias|rout|rms_?norm|fus|fp32|recompute|pre_norm|zero_centered|topk"
)
_KIND = re.compile(r"(?:norm|normalization|position_embedding|attention|attn|mlp|ffn|block|layer)_(?:type|cls|class|kind)$")
_USUAL_KINDS = re.compile(
    r"rms|rope|rotary|default|standard|full|causal|gqa|mha|llama|softmax|glu|flash|sdpa|eager|decoder|^$", re.IGNORECASE
)
_NO_SIZES = re.compile(
    r"rope|rotary|theta|window|quant|compress|generat|sampl|token|slice|dropout|scale|lambda|task_specific|prompt|mtp|nextn|predict|(?:^|_)id"
)
_ENCODER = re.compile(r"(?:^|_)(?:mm|image|images|img|vision|visual|video|audio|speech|siglip\d?|clip|vit)(?:_|$)")


def names_an_encoder(name: str) -> bool:
    """True if an unknown field is of an encoder of images or sound, by its name.

    Args:
        name: Name of the field.
    """
    return _ENCODER.search(name) is not None and not name.startswith("clip_qkv")


def names_a_tensor(name: str, value: Any) -> bool:
    """True if an unknown name says that it decides the number or size of tensors.

    Such are counts, widths and ranks, switches of norms and biases, layers of several kinds, and modes in which layers share parts.

    Args:
        name: Name with underscores for dashes.
        value: Value; True for a switch.
    """
    if _PROCESS.search(name) and "lora" not in name:
        return False
    if isinstance(value, list):
        return name.endswith("layer_types") and len({str(each) for each in value}) > 1
    if isinstance(value, str) and not value.replace(".", "", 1).isdigit():
        return _SHARED.search(name) is not None
    if value is True:
        return _SWITCHED.search(name) is not None and not name.startswith(("no_", "disable_"))
    return isinstance(value, int) and value > 0 and (_COUNTED.search(name) is not None or name.startswith("lora_r"))


_OF_MEMORY = re.compile(
    r"offload|prefetch|swap|recompute|remat|reuse|stash|(?:activation|gradient)_checkpoint|checkpoint_activation|save_memory"
    r"|outer_(?:optim|lr|mom)|diloco|(?:^|_)ema(?:_|$)"
)
_OF_OTHER_MEMORY = re.compile(r"data|rollout|sglang|vllm|profil|log|kv_cache|tokenizer")


def unknown_names(
    names: Sequence[str], values: Mapping[str, Any], shown: Callable[[str], str], at: Callable[[str], Location]
) -> Iterator[Diagnostic]:
    """A note on names that the importer does not know; a warning on those which say that they change what is in memory.

    Args:
        names: The names.
        values: Values by name.
        shown: Function that shows a name with its value.
        at: Function that gives the place of a name.
    """
    of_memory = [
        name
        for name in names
        if values[name] not in (None, False, 0, -1, "", "none", "disable") and _OF_MEMORY.search(name) and not _OF_OTHER_MEMORY.search(name)
    ]
    for found, said, severity in (
        (of_memory, ": not counted, and by its name it changes what is in memory", Severity.WARNING),
        ([name for name in names if name not in of_memory], "", Severity.NOTE),
    ):
        if found:
            yield diagnostic("MP913", "\n".join(shown(name) + said for name in found), at(found[0]), ("--strict",), severity=severity)


def sizes_of_parts(name: str, value: Any, layers: Any) -> bool:
    """True if an unknown list has another size or block for some of the layers, or an unknown mapping has a size or switch inside.

    Args:
        name: Name of the field.
        value: Value.
        layers: Number of layers; no number if it is not known.
    """
    if _NO_SIZES.search(name) or _PROCESS.search(name):
        return False
    if isinstance(value, dict):
        return any((names_a_tensor(str(key), each) and each != 1) or sizes_of_parts(str(key), each, layers) for key, each in value.items())
    if not isinstance(value, list) or len({str(each) for each in value}) < 2:
        return False
    if any(isinstance(each, dict) for each in value):
        return any(sizes_of_parts(name, each, layers) for each in value)
    return len(value) == layers and all(isinstance(each, int) and not isinstance(each, bool) for each in value) and max(value) > 1


def switches_of_own_code(name: str, value: Any) -> bool:
    """True if an unknown switch or mode names a tensor, where code that is published with the weights may read it.

    Args:
        name: Name of the field.
        value: Value.
    """
    if isinstance(value, str):
        return _SHARED.search(name) is not None or (_KIND.search(name) is not None and _USUAL_KINDS.search(value) is None)
    if value is True or (isinstance(value, int) and value > 1 and "_res_" in name):
        return (_SWITCHED.search(name) or _OWN_SWITCH.search(name)) is not None and _NO_SWITCH.search(name) is None
    return False


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy for arguments that the importer does not know.

    Attributes:
        strict: True if each is an error; otherwise only names that decide a tensor are.
        ignored: Names of arguments to omit; names of Megatron have underscores instead of dashes.
    """

    strict: bool = False
    ignored: frozenset[str] = frozenset()

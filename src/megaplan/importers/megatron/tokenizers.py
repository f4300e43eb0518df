"""Sizes of tokenizers that launches name; without `--vocab-size` the tokenizer gives the vocabulary."""

import re
from pathlib import Path
from typing import Any, NamedTuple

from megaplan.importers.megatron.tokenizer_files import counted_tokens
from megaplan.importers.megatron.unset import readable, unset_names

DEFAULT = "GPT2BPETokenizer"
"""Default tokenizer of `pretrain_gpt.py`, from its `args_defaults`."""
GPT2_TOKENS, TIKTOKEN_TOKENS = 50_257, 131_072
OF_MODEL = {
    r"nemotron_2_256k|nemotron-mini|nemotron-?4-|minitron|the_stack_frac_015_256k": 256_000,
    r"nemotron-?h|nemotron-(?:3-)?nano|nemotron-3-(?:super|ultra)": 131_072,
    r"code-?llama|llemma": 32_016,
    r"chinese-(?:llama|alpaca)-2": 55_296,
    r"chinese-llama": 49_953,
    r"swallow-ms": 42_800,
    r"^(?!.*(?:llama-?3|gemma|qwen)).*swallow-(?:7|13|70)b": 43_176,
    r"mistral-?7b.*v0\.3|mathstral|codestral-22b|mistral-large|mistral-small.*2409": 32_768,
    r"mistral-small|ministral|pixtral|devstral|magistral": 131_072,
    r"mixtral.?8x22b.*(?:instruct|v0\.3)": 32_768,
    r"mistral-?7b|mixtral.?8x(?:7|22)b|llama-?2": 32_000,
    r"llama-?4": 201_135,
    r"llama-?3|distill-llama": 128_256,
    r"llama-(?:7|13|30|33|65)b": 32_000,
    r"(?<![a-z])t5-(?:small|base|large|3b|11b)": 32_100,
    r"mt5-(?:small|base|large|xl)": 250_100,
    r"gpt-?2(?![a-z])|gpt-neo-\d": 50_257,
    r"gpt-?j": 50_400,
    r"pythia|20b_tokenizer|(?<!japanese-)gpt-neox|(?<![a-z])mpt-\d+b|state-spaces/mamba": 50_277,
    r"smollm-?3": 128_256,
    r"starcoder|the-?stack|smollm": 49_152,
    r"tiny-?llama|open_?llama|vicuna|solar-10\.7b|zamba": 32_000,
    r"mistral-?nemo|apertus|grok-1": 131_072,
    r"(?<![a-z])yi-?(?:1\.5-)?(?:6|9|34)b": 64_000,
    r"(?<![a-z])bloom(?![a-z])": 250_680,
    r"(?<![a-z])opt-\d+(?:\.\d+)?[bm]|(?<!xlm-)roberta-(?:base|large)": 50_265,
    r"xlm-roberta": 250_002,
    r"bert-base-uncased|bert-large-uncased": 30_522,
    r"olmo-?[23]|dolma-?2": 100_278,
    r"olmo(?:e|-)": 50_280,
    r"falcon-?(?:7|40|180)b": 65_024,
    r"codegen(?!2)|(?<![a-z])phi-(?:1|1[_.]5|2)(?![\d.])": 50_295,
    r"(?<![a-z])phi-3(?:\.5)?-(?:mini|medium|moe)": 32_011,
    r"(?<![a-z])phi-4(?!-mini|-multi)": 100_352,
    r"(?<![a-z])(?<!distill-)qwen-(?:1[._]8|7|14|72)b": 151_851,
    r"qwen[-_]?(?:1[._p]?5|2(?![._p]?5))": 151_646,
    r"qwen[-_]?2[._p]?5|distill-qwen": 151_665,
    r"qwen[-_]?3(?![._p]?[5-9](?!\d*b))(?!.*omni)": 151_669,
    r"qwen[-_]?3[._p]?[56](?!\d*b)": 248_077,
    r"deepseek-?_?v3|deepseek-r1(?!-distill)": 128_815,
    r"deepseek-?_?v2(?![._]5)|deepseek-coder-v2": 100_002,
    r"deepseek-?coder": 32_022,
    r"deepseek-?llm|deepseek-moe-16b": 100_015,
    r"kimi-?k2|moonlight": 163_840,
    r"gpt-?oss|o200k_base": 200_019,
    r"cl100k_base": 100_277,
    r"p50k_base": 50_281,
    r"gemma-?3(?!n)": 262_145,
    r"gemma-?(?:2|[27]b)": 256_000,
    r"command-r|c4ai-aya": 255_029,
    r"baichuan-?2": 125_696,
    r"baichuan-?(?:7|13)b": 64_000,
    r"internlm-?2": 92_544,
    r"minicpm-?[34]": 73_448,
    r"minicpm-?[12]b": 122_753,
    r"stablelm-2": 100_289,
    r"granite-3\.[012]": 49_155,
    r"jamba": 65_536,
    r"eurollm": 128_000,
    r"salamandra": 256_000,
    r"codeparrot": 32_768,
    r"code10k_en20k_ja30k": 48_588,
    r"code20k_en40k_ja60k": 96_869,
    r"llm-jp.*(?:100k|ver3|v3)": 99_487,
}
"""Sizes by a part of a model's name; added tokens included, as Megatron counts them."""
WORDS_OF_MODEL = {
    r"deepseek-?_?v3": 128_813,
    r"deepseek-?_?v2|deepseek-coder-v2": 100_000,
    r"qwen|qwq": 151_643,
    r"llama-?_?3": 128_000,
    r"llama-?_?2|mistral|mixtral": 32_000,
    r"(?<![a-z])yi(?![a-z])|yitokenizer": 64_000,
    r"falcon": 65_024,
}
"""Words of tokenizers as Pai-Megatron-Patch counts them, without added tokens, by a part of a model's or a tokenizer's name."""
NAMELESS = re.compile(r"(?:^|/)tokenizer(?:\.model|\.json)?$|path[/_ -]?to(?![a-z])|<[^>]*>|(?<![a-z])your(?![a-z])", re.IGNORECASE)
"""Names of files that every tokenizer has, and placeholders of examples."""
OF_TYPE = {"Llama2Tokenizer": 32_000, "Llama3Tokenizer": 128_256}
"""Sizes that a type suggests if the tokenizer's file is not named."""
OF_SIZES: dict[str, tuple[int, int, tuple[tuple[int, int, int], ...]]] = {
    "Llama 2": (32_000, 10_000, ((4096, 11_008, 32), (5120, 13_824, 40), (8192, 28_672, 8))),
    "Llama 3": (128_256, 500_000, ((2048, 8192, 8), (3072, 8192, 8), (4096, 14_336, 8), (8192, 28_672, 8), (16_384, 53_248, 8))),
    "Mistral 7B": (32_000, 10_000, ((4096, 14_336, 8),)),
    "Mixtral 8x7B": (32_000, 1_000_000, ((4096, 14_336, 8),)),
    "Qwen2.5": (151_665, 1_000_000, ((1536, 8960, 2), (3584, 18_944, 4), (5120, 13_824, 8), (5120, 27_648, 8), (8192, 29_568, 8))),
    "Qwen3": (
        151_669,
        1_000_000,
        ((1024, 3072, 8), (2048, 6144, 8), (2560, 9728, 8), (4096, 12_288, 8), (5120, 17_408, 8), (5120, 25_600, 8)),
    ),
}
"""Tokens of public models, the base of their angles, and their hidden sizes, widths of MLPs and heads of keys."""
_NUMBER = re.compile(r"(?<![\d.])[1-9]\d{4,5}(?!\d|\.\d|[bkm](?![a-z]))")
"""A number in a tokenizer's name that is the size of a vocabulary: five or six digits."""


class Tokens(NamedTuple):
    """The tokens of a launch: their number, or None if unknown, the tokenizer for readers, and the reason if the number is a guess."""

    size: int | None
    shown: str
    guess: str = ""


class Sizes(NamedTuple):
    """Sizes of a launch by which a public model is known."""

    hidden: Any
    ffn: Any
    key_heads: Any
    base: Any


def tokenizer_size(kind: Any, model: Any, vocabulary: Any = None, script: str = "", sizes: Sizes | None = None) -> Tokens:
    """The tokens of a launch.

    A file that is here is counted, and the name of a model in its path has that model's tokens. Where no file is named, or by a variable
    that is set nowhere, or by no name of its own (`data/tokenizer.model`), the script's name, then the type and then the model's sizes
    suggest one. A name that no type has gives no guess except a number in it: it may be a custom tokenizer.

    Args:
        kind: `--tokenizer-type`; None for Megatron's default.
        model: `--tokenizer-model`; None if absent.
        vocabulary: `--vocab-file`; None if absent.
        script: Path of the launch.
        sizes: Sizes of the model, if they are known.
    """
    name = str(kind or DEFAULT)
    model = None if model in (None, True) else str(model)  # True: the argument has no value
    shown = f"{name} {readable(model)}" if model else name if kind else f"{name}, Megatron's default"
    if name == "TikTokenizer":
        return Tokens(TIKTOKEN_TOKENS, f"{shown}, Megatron's limit without --vocab-size")
    if model and not unset_names(model):
        size = _of_name(model) or counted_tokens(model, script)
        if size is not None or NAMELESS.search(model) is None:
            return Tokens(size, shown) if size is not None else _of_number(model, shown)
    if name == DEFAULT and not model:
        return _of_gpt2(vocabulary, shown, script)
    if model and (size := _of_name(readable(model))) is not None:
        return Tokens(size, shown)
    file = (model or "").rpartition("/")[2]
    if file and not unset_names(file) and NAMELESS.search(file) is None:
        return _of_number(readable(model), shown)
    return _suggested(name, shown, script, sizes)


def _suggested(kind: str, shown: str, script: str, sizes: Sizes | None) -> Tokens:
    """The tokens that the script's name suggests, or the type, or the model's sizes."""
    named = "/".join(script.split("/")[-2:])
    if (size := _of_name(named)) is not None:
        return Tokens(size, shown, f"by the name {named}")
    if kind in OF_TYPE or sizes is None:
        return Tokens(OF_TYPE.get(kind), shown, "as its type has as a rule")
    public = next((public for public, (_, base, of) in OF_SIZES.items() if sizes.base == base and sizes[:3] in of), None)
    return Tokens(None, shown) if public is None else Tokens(OF_SIZES[public][0], shown, f"as {public}, whose sizes the model has")


def patched_words(kind: Any, load: Any, script: str) -> int | None:
    """Words to which `--extra-vocab-size` adds rows, by the checkpoint, then the script's place, then `--patch-tokenizer-type`.

    The type comes last, since several models share one. Source: `megatron_patch/tokenizer/__init__.py` of alibaba/Pai-Megatron-Patch.
    """
    names = ("/".join(str(load or "").split("/")[-2:]), "/".join(str(Path(script).absolute()).split("/")[-2:]), str(kind or ""))
    found = (size for name in names for part, size in WORDS_OF_MODEL.items() if re.search(part, name.lower()))
    return next(found, None)


def _of_gpt2(vocabulary: Any, shown: str, script: str) -> Tokens:
    """The tokens of a vocabulary file in GPT-2's format; GPT-2's own if no other is named."""
    if not isinstance(vocabulary, str) or unset_names(vocabulary) or re.search(r"gpt-?2", vocabulary.lower()):
        return Tokens(GPT2_TOKENS, shown)
    if NAMELESS.search(vocabulary):
        return Tokens(GPT2_TOKENS, f"{shown} with {vocabulary}", "as its type has as a rule")
    size, shown = counted_tokens(vocabulary, script) or _of_name(vocabulary), f"{shown} with {vocabulary}"
    if size is None and (numbered := _of_number(vocabulary, shown)).size is not None:
        return numbered
    if size is None and re.search(r"(?:^|/)vocab\.json$", vocabulary) and "token" not in vocabulary.lower():
        return Tokens(GPT2_TOKENS, shown, "as its type has as a rule")
    return Tokens(size, shown)


def _of_number(name: str, shown: str) -> Tokens:
    """The only number in a tokenizer's name that can be a size; no guess without one."""
    found = {int(each) for each in _NUMBER.findall("/".join(name.split("/")[-2:]).lower())}
    return Tokens(found.pop(), shown, "as its name says") if len(found) == 1 else Tokens(None, shown)


def _of_name(name: str) -> int | None:
    """The size of the tokenizer that a model's name has."""
    return next((size for part, size in OF_MODEL.items() if re.search(part, name.lower())), None)

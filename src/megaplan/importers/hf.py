"""`import_hf`: a Hugging Face `config.json` as a spec."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megaplan.diagnostics import diagnostic
from megaplan.errors import Diagnostic, Location, MegaplanError, Severity
from megaplan.importers.defaults import class_facts
from megaplan.importers.imported import Imported
from megaplan.importers.likeness import candidates, of_no_class, other_task
from megaplan.importers.reader import ConfigReader
from megaplan.importers.registry import IMPORTS, MAMBA_SSM, MAMBA_SSM_FIELDS, MASKED, OF_REPOSITORIES, REFUSED, RENAMED
from megaplan.importers.towers import MULTIMODAL, inside, split_text, towers_of
from megaplan.spec.document import MAX_DEPTH, Document, SourceMap, parse_document
from megaplan.spec.hub import is_model_name
from megaplan.spec.overrides import apply_overrides
from megaplan.spec.read import MAX_BYTES

NESTED = "text_config"
"""Key of the text model's fields in the config of a multimodal model."""
_NESTING = (NESTED, "llm_config", "language_config")
"""The same, and its names in classes that repositories publish."""
LARGE_CHARACTERS = 2**16
STORED = ("quantization_config", "compression_config")
"""Fields of a config that list modules of the published weights."""
MICRO_BATCH_SIZE = 1
SEQ_LENGTH = 4096
WITHIN = {
    "qwen2_5_omni": ("thinker_config", "qwen2_5_omni_thinker"),
    "qwen3_omni_moe": ("thinker_config", "qwen3_omni_moe_thinker"),
}
"""Types of several models: the key of the one that reads and writes text, and its type."""
_DRAFT = re.compile(r"Draft|Eagle\d?|Medusa|Speculator")
"""Parts of the names of classes that draft tokens for another model."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True, slots=True)
class ImportedConfig(Imported):
    """A Hugging Face config as a spec.

    Attributes:
        family: The config's `model_type`.
    """

    family: str


def import_hf(text: str, name: str, overrides: Sequence[str] = (), *, strict: bool = False) -> ImportedConfig:
    """The spec of a config.

    Args:
        text: The config.
        name: Name of the file in diagnostics.
        overrides: `KEY=VALUE` texts, keys of the spec: mesh, batch and everything else that a config does not say.
        strict: True if unknown fields, and absent fields with a class default, are errors.

    Raises:
        MegaplanError: Every error found: MP109 … MP119, MP801 … MP807, or those of the spec that results.
    """
    read, marks = _fields(text, name)
    whole, stated = _typed(read, name), "model_type" in read
    _check_refused(whole, marks, text)
    given, (whole, marks, parts) = whole["model_type"], _inner_model(whole, marks)
    config, source = _text_model(whole, marks)
    _check_type(config, source, text)
    family = _family_of(config)
    reader = ConfigReader(config, source, family, class_facts(family), strict=strict)
    if parts:
        reader.warn("model_type", config["model_type"], f"{', '.join(parts)}: not imported, and not counted")
    elif whole["model_type"] != given:
        why = "its class is in architectures" if whole["model_type"] in MULTIMODAL else "no encoder is stated"
        reader.warn("model_type", given, f"read as {whole['model_type']}: {why}")
    _note_reading(reader, whole, config, stated=stated)
    _check_architectures(reader)
    model = IMPORTS[family](reader)
    notes: Sequence[Diagnostic] = ()
    reader.stop_if_wrong()
    if reader.knows_nothing:
        detail = f"{name} has no field of a {config['model_type']} config but its type"
        raise _refusal("MP801", detail, source.locate("model_type"), "megaplan import hf config.json")
    if whole["model_type"] in MULTIMODAL:
        towers, notes = towers_of(whole, marks, model["hidden_size"])
        model |= {"towers": towers} if towers else {}
    plain = {
        "format": "megaplan.spec/1",
        "name": _name(config, name),
        "model": model,
        "optimizer": {"matrix": "adamw"},  # of nearly all published training
        "batch": {"micro_batch_size": MICRO_BATCH_SIZE, "seq_length": _positions(model, config)},
    }
    document = apply_overrides(Document(plain, SourceMap(name)), overrides)
    try:
        imported = Imported.of(document, (*reader.warnings, *notes, *_batch_note(document, name)))
    except MegaplanError as error:
        values = any(each.location.key and each.location.key.startswith("model.") for each in error.diagnostics)
        defaults = [note for note in reader.warnings if note.code == "MP822" and values]  # which may be the cause
        raise MegaplanError((*error.diagnostics, *defaults)) from None
    return ImportedConfig(imported.loaded, imported.document, family)


def _note_reading(reader: ConfigReader, whole: Mapping[str, Any], config: Mapping[str, Any], *, stated: bool) -> None:
    """Warns if another type than the config's own is read, and of parts of the config that are not read."""
    if NESTED in config:
        reader.skip(NESTED)
        place = next((key for key in _NESTING if isinstance(whole.get(key), dict)), NESTED)
        reader.warn(place, place, "only the text model is imported; other models of the config are not counted")
    _note_tie(reader, whole)
    if reader.family != config["model_type"]:
        reader.warn("model_type", config["model_type"], f"read as {reader.family}, whose fields, blocks and names of tensors it has")
    if not stated:
        of = "the fields" if config["model_type"] == MAMBA_SSM else "the class in architectures"
        reader.warn("model_type", config["model_type"], f"absent, and inferred from {of}; transformers requires one")
    if config["model_type"] in MASKED:
        reader.skip("mask_token_id")
        key = "mask_token_id" if reader.has("mask_token_id") else "architectures"
        reader.warn(key, reader.value(key), "a masked token attends to both sides, but the core is counted as causal")


def _positions(model: Mapping[str, Any], config: Mapping[str, Any]) -> int:
    """Tokens of the default sequence: the number of learned positions, without those that a class reserves for padding."""
    limits = [model.get("learned_positions"), config.get("max_position_embeddings") if "learned_positions" in model else None]
    return min([SEQ_LENGTH, *(limit for limit in limits if isinstance(limit, int))])


def _fields(text: str, name: str) -> tuple[dict[str, Any], SourceMap]:
    """The config's fields and their positions."""
    _check_json(text, name)
    small = _without_modules(text, name)
    # Python writes the limits of time steps as Infinity, which no JSON reader but Python's takes; the reader of specs keeps it as text.
    try:
        read = parse_document(small.replace("\t", " "), None)
        faults = read.faults
    except MegaplanError as error:
        faults = error.diagnostics
    if faults:
        raise MegaplanError(replace(fault, location=fault.location._replace(file=name)) for fault in faults)
    source = SourceMap(name, read.source.marks if small is text else {})
    if not isinstance(read.value, dict):
        raise _refusal("MP801", f"{name} is not a mapping", Location(name), "megaplan import hf config.json")
    return read.value, source


def _typed(config: dict[str, Any], name: str) -> dict[str, Any]:
    """The config with its model type; if none is given, the type of the class that `architectures` names."""
    if isinstance(config.get("model_type"), str):
        return config
    if isinstance(config.get("peft_type"), str):
        raise _adapter(config, name)
    named = "" if "model_type" in config else _named_class(config)
    found = _owner(named, (*IMPORTS, *MULTIMODAL)) if named else MAMBA_SSM if set(config) >= MAMBA_SSM_FIELDS else ""
    if not found:
        hints = candidates(config, lambda other: import_hf(other, name))
        raise _refusal("MP801", f"{name} has no text model_type", Location(name), *hints, "megaplan import hf config.json")
    return {**config, "model_type": found}


def _adapter(config: Mapping[str, Any], name: str) -> MegaplanError:
    """The error for the config of adapters, which says nothing of the model under them."""
    base, rank = config.get("base_model_name_or_path"), config.get("r")
    ranked = f" --set lora.rank={rank} --set lora.alpha={config.get('lora_alpha') or rank}" if isinstance(rank, int) else ""
    where = base if isinstance(base, str) and re.fullmatch(r"[\w./-]+", base) else "config.json"
    detail = f"{name} is an adapter's config (peft_type = {config['peft_type']}); the model is in the config of {base or 'its base model'}"
    return _refusal("MP801", detail, Location(name), f"megaplan import hf {where}{ranked}")


def _family(model_type: str) -> str:
    """The model type whose import reads a text model: its own, the one that it is renamed from, or the text model of its outer name."""
    known = {*IMPORTS, *REFUSED, *RENAMED}
    names = (model_type, f"{model_type}_text")
    found = next((name for name in names if name in known), model_type)
    return RENAMED.get(found, found)


def _family_of(config: Mapping[str, Any]) -> str:
    """The model type whose import reads a text model: of the repository's class, or if that is unknown, of transformers' class.

    `architectures` names the class.
    """
    family, name = _family(config["model_type"]), _named_class(config)
    if family == "deepseek_v2" and config.get("use_mla") is False:  # the class in this repository builds the first version's model
        return "deepseek"
    if name and family in OF_REPOSITORIES and name != class_facts(family).model_class:
        return next((one for one in OF_REPOSITORIES if class_facts(one).model_class == name), family)
    if family in {*IMPORTS, *REFUSED} or "auto_map" in config:  # a class of the repository may have the same name as another
        return family
    if not name or config["model_type"] in MULTIMODAL:
        return family
    return _owner(name, IMPORTS) or family


def _owner(name: str, kinds: Iterable[str]) -> str:
    """The model type of a class: of several, the one in the class's name, else the first; empty for none."""
    owners = [one for one in kinds if class_facts(one).model_class == name]
    return next((one for one in owners if one.replace("_", "") in name.lower()), owners[0] if owners else "")


def _named_class(config: Mapping[str, Any]) -> str:
    """The one class that `architectures` names; empty if it names none, or several."""
    classes = config.get("architectures")
    return classes[0] if isinstance(classes, list) and len(classes) == 1 and isinstance(classes[0], str) else ""


def _check_refused(fields: dict[str, Any], source: SourceMap, text: str) -> None:
    """Stops at a model type, of the config or its text model, whose blocks have no letter."""
    family = fields["model_type"]
    if _family(family) in REFUSED:
        key, why = REFUSED[_family(family)]
        at = source.locate(key) if key in fields else source.locate("model_type")
        raise _unknown("MP805", f"model_type = {family}, {key}: {why}", at, text)


def _check_type(fields: dict[str, Any], source: SourceMap, text: str) -> None:
    """Stops at a model type that no import reads."""
    _check_refused(fields, source, text)
    family = fields["model_type"]
    if _family_of(fields) not in IMPORTS:
        why, at = other_task(fields), source.locate("model_type")
        hints = () if why else candidates(fields, lambda other: import_hf(other, source.file or ""))
        why = why or f", and {len(IMPORTS)} others are read{'' if hints else of_no_class(fields)}"
        raise _unknown("MP802", f"model_type = {json.dumps(family[:80])}{why}", at, text, hints)


def _unknown(code: str, detail: str, at: Location, text: str, hints: tuple[str, ...] = ()) -> MegaplanError:
    """The error for a model type that is not read, with its parameters as transformers counts them where it is installed."""
    from megaplan.importers.meta_count import counted  # noqa: PLC0415  (only for a model that is not read)

    found = [diagnostic(code, detail, at, (*hints, "megaplan new list"))]
    said = counted(text)
    if said is not None:
        found.append(diagnostic("MP826", said, at, severity=Severity.NOTE))
    return MegaplanError(found)


def _inner_model(config: dict[str, Any], source: SourceMap) -> tuple[dict[str, Any], SourceMap, tuple[str, ...]]:
    """The model of text and encoders in a config of several models, with the positions of its fields and the others' keys.

    A config that states no encoder has none if `architectures` names the class of the text model alone, or if it names no class and nests
    no text model; one whose text model is nested, and whose `architectures` names a class with encoders, has that class's type.
    """
    family = config["model_type"]
    key, kind = WITHIN.get(family, ("", ""))
    part = config.get(key)
    if not isinstance(part, dict):
        named, facts = _named_class(config), class_facts(family)
        if family in MULTIMODAL and named != facts.model_class and not any(config.get(one) for one in set(facts.parts) - {NESTED}):
            text, at = split_text(config, source)
            alone = named == class_facts(text["model_type"]).model_class if named else "num_hidden_layers" in config
            config, source = (text, at) if alone else (config, source)
        elif family in IMPORTS and isinstance(config.get(NESTED), dict):
            kind = next((one for one in MULTIMODAL if class_facts(one).model_class == named), family)
            config = {**config, "model_type": kind}
        return config, source, ()
    others = tuple(sorted(name for name, value in config.items() if isinstance(value, dict) and name != key))
    return {**part, "model_type": kind}, inside(source, key), others


def text_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config's text model as a separate config; the fields themselves if the config nests none."""
    fields = dict(config)
    if isinstance(fields.get("model_type"), str):
        fields = _inner_model(fields, SourceMap(""))[0]
    if fields.get("model_type") in MULTIMODAL:
        return split_text(fields, SourceMap(""))[0]
    found = _text_model(fields, SourceMap(""))[0] if "model_type" in fields else fields
    return {key: value for key, value in found.items() if key != NESTED}


def _text_model(config: dict[str, Any], source: SourceMap) -> tuple[dict[str, Any], SourceMap]:
    """The text model of a config that nests one, with the positions of its fields; any other config unchanged."""
    family = config["model_type"]
    if family in MULTIMODAL:
        return split_text(config, source)
    place = next((key for key in _NESTING if isinstance(config.get(key), dict)), "")
    if not place or family in IMPORTS:
        return config, source
    nested, inner = config[place], config[place].get("model_type")
    if not isinstance(inner, str):
        inner = _owner(_named_class(nested), IMPORTS) or _family(family)
    marks = {key.removeprefix(f"{place}."): mark for key, mark in source.marks.items() if key.startswith(f"{place}.")}
    above = {key: config[key] for key in ("tie_word_embeddings",) if key in config and key not in nested}
    marks |= {key: source.marks[key] for key in ("model_type", *above) if key in source.marks and key not in marks}
    return {**nested, **above, "model_type": inner, NESTED: sorted(set(config) - {place})}, SourceMap(source.file, marks)


def _note_tie(reader: ConfigReader, whole: Mapping[str, Any]) -> None:
    """Warns if a text model's own `tie_word_embeddings` differs from the value that its class takes from the outer config."""
    nested = whole.get(NESTED)
    stated = nested.get("tie_word_embeddings") if isinstance(nested, dict) else None
    taken = reader.value("tie_word_embeddings")
    if isinstance(stated, bool) and isinstance(taken, bool) and stated != taken:
        said = f"of the whole config, as in {reader.facts.origin}; {NESTED} has {str(stated).lower()}, which earlier releases may take"
        reader.warn("tie_word_embeddings", taken, said)


def _check_json(text: str, name: str) -> None:
    try:
        json.loads(text, parse_int=str, parse_float=str)
    except json.JSONDecodeError as error:
        raise _refusal("MP109", error.msg[:1].lower() + error.msg[1:], Location(name, error.lineno, error.colno)) from None
    except RecursionError:
        raise _refusal("MP117", f"more than {MAX_DEPTH} lists or mappings inside each other", Location(name)) from None


def _without_modules(text: str, name: str) -> str:
    """A large config without the lists of its `quantization_config`, which no spec reads; a small one unchanged.

    Raises:
        MegaplanError: MP104, what is left is too large.
    """
    if len(text) <= LARGE_CHARACTERS:
        return text
    config = json.loads(text)
    held = (config, *(config.get(key) for key in _NESTING)) if isinstance(config, dict) else ()
    for fields in (one for one in held if isinstance(one, dict)):
        for key in set(fields) & set(STORED):
            inside = fields[key].items() if isinstance(fields[key], dict) else ()
            fields[key] = {name: value for name, value in inside if not isinstance(value, dict | list)}
    small = json.dumps(config, ensure_ascii=False, indent=1)
    if len(small) > MAX_BYTES:
        raise _refusal("MP104", f"{name} holds {len(text):,} characters, and a config has at most {MAX_BYTES:,} bytes", Location(name))
    return small


def _check_architectures(reader: ConfigReader) -> None:
    """Checks that the published class is a language model with a head over the vocabulary."""
    given = reader.value("architectures")
    named = " ".join(map(str, given)) if isinstance(given, list) else ""
    if _DRAFT.search(named):
        reader.refuse("architectures", given, "a draft model of speculative decoding, whose layers read the hidden states of another model")
        reader.stop_if_wrong()
    if given is not None and not (isinstance(given, list) and all(_predicts(reader, one) for one in given)):
        reader.cannot("architectures", given, "a spec ends in a head over the vocabulary", None)
    other = _owner(named, IMPORTS) if named != reader.facts.model_class else ""
    known = {_mapped(reader), *(class_facts(one).model_class for one in (reader.family, *IMPORTS, *MULTIMODAL))}
    strange = [name for name in named.split() if name not in known]
    if strange and reader.facts.version and reader.value("model_type") == reader.family:
        reader.warn("architectures", strange, f"a class that is not known and may build other tensors; {reader.family} is counted")
    if other:
        reader.other = other
        reader.warn("architectures", given, f"the class of {reader.other}, but model_type decides the structure, as in transformers")
    own = _mapped(reader)
    if own not in ("", reader.facts.model_class) and reader.facts.version and not other and reader.value("model_type") == reader.family:
        reader.warn("auto_map", own, f"a class that is published with the weights and may build other tensors; {reader.family} is counted")


def _predicts(reader: ConfigReader, name: object) -> bool:
    """True if a class has a head over the vocabulary: by its name, by `auto_map`, or because every class of its type has."""
    if reader.value("model_type") in MASKED:
        return True
    if any(class_facts(one).model_class == name and _text_type(one) == reader.family for one in MULTIMODAL):
        reader.warn("architectures", name, "a class with encoders, of which the config states none: none is counted")
        return True
    return isinstance(name, str) and (name.endswith("ForCausalLM") or name in (reader.facts.model_class, _mapped(reader)))


def _mapped(reader: ConfigReader) -> str:
    """The class of the repository that `auto_map` names, in some of them for another head; empty for none."""
    code = reader.value("auto_map")
    names = [code.get(f"AutoModelFor{task}", "") for task in ("CausalLM", "Seq2SeqLM")] if isinstance(code, dict) else [""]
    return str(names[0] or names[-1]).rpartition(".")[2]


def _text_type(model_type: str) -> str:
    """The type of the text model in a multimodal type; empty if it varies."""
    part = class_facts(model_type).parts.get(NESTED)
    return "" if part is None else part.type


def _name(config: dict[str, Any], source: str) -> str:
    """The spec's name: the last part of the config's origin, or its family."""
    origin = source if is_model_name(source) else config.get("_name_or_path")
    last = origin.rstrip("/").rpartition("/")[2] if isinstance(origin, str) else ""
    return last if _NAME.fullmatch(last) else str(config["model_type"]).replace("_", "-")


def _batch_note(document: Document, name: str) -> tuple[Diagnostic, ...]:
    given = set(document.source.overrides)
    keys = [key for key in ("micro_batch_size", "seq_length") if not given & {"batch", f"batch.{key}"}]
    if not keys:
        return ()
    batch = document.value["batch"]
    values = " and ".join(f"batch.{key} = {batch[key]:,}" for key in keys)
    hint = " ".join(f"--set batch.{key}={batch[key]}" for key in keys)
    return (diagnostic("MP821", f"{values} until set", Location(name), (hint,), severity=Severity.NOTE),)


def _refusal(code: str, detail: str, location: Location, *hints: str) -> MegaplanError:
    return MegaplanError([diagnostic(code, detail, location, hints)])

"""MP8xx. Configs of other projects."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

IMPORTS: dict[str, CodeInfo] = {
    "MP801": CodeInfo(
        "not a Hugging Face config",
        "The JSON document is not a mapping, or has no `model_type` of text.",
        "`model_type` decides how all other fields are read.",
        "Pass the `config.json` from the folder of the model's weights.",
        '{"model_type": "llama", "hidden_size": 4096, ...}',
    ),
    "MP802": CodeInfo(
        "the model type is not supported",
        "There is no importer for this `model_type`, or a spec has no letter for its blocks.",
        "Fields of the same name have different meanings in different families, so they cannot be guessed.",
        "Write the spec by hand, from the nearest bundled one (`megaplan new list`).",
        '{"model_type": "falcon_h1", ...}      # wrong: attention and Mamba heads in parallel in one block',
    ),
    "MP803": CodeInfo(
        "a field of the config is missing",
        "A field that the family's shapes or equations need is missing, and transformers' class has no default for it; with `--strict`, "
        "whether it has one or not.",
        "What is built depends on it.",
        "Add the field with the released model's value; null is a value.",
        '{"model_type": "deepseek_v3", "q_lora_rank": null, ...}',
    ),
    "MP804": CodeInfo(
        "a field of the config has the wrong type",
        "The field's value has another type or is outside its bounds.",
        "Values are not converted: text, a fraction or true is not accepted as an integer.",
        "Write a value as the message describes.",
        '{"hidden_size": "4096"}      # wrong\n{"hidden_size": 4096}',
    ),
    "MP805": CodeInfo(
        "a spec cannot express a field",
        "The field's value adds tensors or computations that no key of a spec describes.",
        "Without it the estimate would be of another model.",
        "Plan another model, or write the value that the hint names in a copy of the config.",
        '{"model_type": "llama", "attention_bias": true}      # wrong: the output projection has a bias too',
    ),
    "MP806": CodeInfo(
        "the importer does not know a field",
        "transformers' class has the field, and the importer neither reads it nor knows it to be irrelevant. With `--strict`, any field "
        "that the importer does not know.",
        "Ignoring it might omit a part of the model.",
        "Remove it from a copy of the config if it changes no tensor; docs/reference/hf-import.md lists the known fields.",
        '{"model_type": "llama", "num_registers": 4}      # wrong',
    ),
    "MP807": CodeInfo(
        "fields of the config contradict each other",
        "Two fields give different values for the same property.",
        "One of them is wrong, and only the model's authors know which.",
        "Correct the field that is wrong.",
        '{"num_hidden_layers": 4, "layer_types": ["mamba", "attention"]}      # wrong',
    ),
    "MP820": CodeInfo(
        "the spec has no counterpart of a field",
        "The field changes computed values, but no parameter, storage or matrix product.",
        "The estimate is valid for the original; training from the spec ignores the field.",
        "No action is needed for planning. Do not load the published weights into the spec's model without the field.",
        '{"embedding_multiplier": 12}',
    ),
    "MP821": CodeInfo(
        "a config does not state the batch",
        "No `--set` gives the batch, so one sequence of 4,096 tokens is assumed.",
        "A config describes a model; memory also depends on the tokens per microbatch.",
        "Set both values.",
        "megaplan estimate config.json --set batch.micro_batch_size=2 --set batch.seq_length=8192",
    ),
    "MP822": CodeInfo(
        "fields have the defaults of transformers' class",
        "The config does not have these fields, and transformers' class has defaults for them, in the version that the note names.",
        "Every program that loads the config with transformers builds this model.",
        "Compare the values with the released model's if the config was written by hand; `--strict` refuses absent fields.",
        '{"model_type": "qwen3", "hidden_size": 4096}      # head_dim = 128, as the class has it',
    ),
    "MP823": CodeInfo(
        "transformers does not know a field",
        "The class of the model type has no such field, so transformers builds the model without it.",
        "The field belongs to another program, or to code that comes with the model.",
        "No action is needed for a model that transformers builds; `--strict` refuses such fields.",
        '{"model_type": "llama", "num_registers": 4}',
    ),
}

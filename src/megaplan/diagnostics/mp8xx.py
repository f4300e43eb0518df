"""MP8xx. Configs of other projects."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

IMPORTS: dict[str, CodeInfo] = {
    "MP801": CodeInfo(
        "not a Hugging Face config",
        "The JSON document is no mapping, or has no text `model_type`.",
        "`model_type` says how all other fields are to be read.",
        "Give the `config.json` that lies beside the model's weights.",
        '{"model_type": "llama", "hidden_size": 4096, ...}',
    ),
    "MP802": CodeInfo(
        "a model type that is not imported",
        "No import is written for this `model_type`, or its blocks have no letter in a spec.",
        "Fields of the same name mean different things in different families; a guess would give a wrong count.",
        "Write the spec by hand, from the nearest bundled one (`megaplan new list`).",
        '{"model_type": "falcon_h1", ...}      # wrong: attention and Mamba heads side by side in one block',
    ),
    "MP803": CodeInfo(
        "the config lacks a field",
        "A field that the family's shapes or equations need is not there.",
        "What a library fills in is its class's default, which is often another model than the one released.",
        "Add the field with the released model's value; null is a value.",
        '{"model_type": "deepseek_v3", "q_lora_rank": null, ...}',
    ),
    "MP804": CodeInfo(
        "a field of the config has the wrong type",
        "The field's value is of another type or outside its bounds.",
        "Nothing is coerced: no text, fraction or true passes as an integer.",
        "Write the value that the message names.",
        '{"hidden_size": "4096"}      # wrong\n{"hidden_size": 4096}',
    ),
    "MP805": CodeInfo(
        "a field that a spec cannot express",
        "The field has a value that gives the model tensors or work that no key of a spec describes.",
        "Leaving it out would count another model.",
        "Plan another model, or write the value that the hint names in a copy of the config.",
        '{"model_type": "llama", "attention_bias": true}      # wrong: the output projection has a bias too',
    ),
    "MP806": CodeInfo(
        "a field that the import does not know",
        "The field is none of those that the family reads, and none of those known to be irrelevant.",
        "Ignoring it might leave out a part of the model.",
        "Remove it from a copy of the config if it changes no tensor; the reference of imports lists what is known.",
        '{"model_type": "llama", "num_registers": 4}      # wrong',
    ),
    "MP807": CodeInfo(
        "fields of the config contradict each other",
        "Two fields state the same thing differently.",
        "One of them is wrong, and only the model's authors know which.",
        "Correct the field that is wrong.",
        '{"num_hidden_layers": 4, "layer_types": ["mamba", "attention"]}      # wrong',
    ),
    "MP820": CodeInfo(
        "a field that the spec does not carry",
        "The field changes what is computed, and neither a parameter, a byte nor a matrix product.",
        "The estimate is the original's; training from the spec computes without it.",
        "Nothing for planning. Do not load the published weights into the spec's model without the field.",
        '{"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}',
    ),
    "MP821": CodeInfo(
        "a config says nothing of the batch",
        "No `--set` gives the batch, and one sequence of 4,096 tokens stands.",
        "A config describes a model; memory also depends on the tokens of a microbatch.",
        "Set both values.",
        "megaplan estimate config.json --set batch.micro_batch_size=2 --set batch.seq_length=8192",
    ),
}

"""MP7xx. Sections of the model, and policies by family."""

from __future__ import annotations

from megaplan.diagnostics.info import CodeInfo

MODEL: dict[str, CodeInfo] = {
    "MP701": CodeInfo(
        "key-value heads do not divide the heads",
        "`num_heads` is not a multiple of `num_kv_heads`.",
        "Each key-value head serves the same number of query heads.",
        "Use a divisor of `num_heads`.",
        "attention: {kind: gqa, num_heads: 32, num_kv_heads: 6, head_dim: 128}      # wrong: 32 % 6 = 2",
    ),
    "MP702": CodeInfo(
        "the Mamba width is not a multiple of the head width",
        "expand · hidden_size is not a multiple of `head_dim`.",
        "The inner width is divided into heads of `head_dim`.",
        "Use a `head_dim` that divides it, or give `num_heads` (mamba2).",
        "hidden_size: 1000\nmamba: {kind: mamba2, expand: 2, head_dim: 64}      # wrong: 2000 % 64 = 16",
    ),
    "MP703": CodeInfo(
        "groups do not divide the Mamba heads",
        "The number of heads is not a multiple of `num_groups`.",
        "Each group's B and C serve the same number of heads.",
        "Use a divisor of the number of heads.",
        "mamba: {kind: mamba2, num_heads: 80, num_groups: 3}      # wrong: 80 % 3 = 2",
    ),
    "MP704": CodeInfo(
        "top_k exceeds the number of experts",
        "`top_k` is above `num_experts`.",
        "A token is routed to `top_k` different experts.",
        "Use a `top_k` of at most `num_experts`.",
        "moe: {num_experts: 8, top_k: 16, ffn_hidden_size: 896}      # wrong",
    ),
    "MP705": CodeInfo(
        "a routing factor exceeds its bound",
        "`capacity_factor` or `routing_skew` is above num_experts / top_k.",
        "An expert receives at most every token once, which is num_experts / top_k times the even share.",
        "Use a factor within the bound.",
        "moe: {num_experts: 8, top_k: 2, ffn_hidden_size: 896, routing_skew: 9}      # wrong: at most 4",
    ),
    "MP706": CodeInfo(
        "a listed layer has no attention",
        "The list has a layer that does not exist or is not an A layer.",
        "Layers are numbered from 0 over the whole model, including all letters.",
        "List A layers only.",
        "pattern: AEME\nnope_layers: [1]      # wrong: layer 1 is E",
    ),
    "MP707": CodeInfo(
        "the indexer needs latent queries",
        "The indexer reads the query latent, and `q_lora_rank` is null.",
        "Its query projection takes the latent as input.",
        "Give `q_lora_rank`, or remove the indexer.",
        "attention: {kind: mla, q_lora_rank: null, indexer: {num_heads: 8, head_dim: 64, layers: [0]}}      # wrong",
    ),
    "MP708": CodeInfo(
        "rotary width is odd",
        "The number of rotated dims must be even.",
        "Rotary embedding rotates pairs of dims.",
        "Use an even number.",
        "attention: {kind: gqa, num_heads: 4, num_kv_heads: 4, head_dim: 63}      # wrong",
    ),
    "MP709": CodeInfo(
        "the feature needs blocks that the pattern lacks",
        "A prediction module has blocks as the layers', attention unless its own pattern says otherwise, and relation bias is added to"
        " attention scores; the pattern has none of these.",
        "Their shapes are those of the layers' section, such as `model.attention`.",
        "Add the letter to the pattern with its section, or remove the feature.",
        "pattern: M\nfeatures: {mtp: {depth: 1, ffn_hidden_size: 4096}}      # wrong",
    ),
    "MP710": CodeInfo(
        "fewer n-gram rows than tables",
        "`num_rows` counts the rows of all tables, and each table has at least one.",
        "A table needs a row to look up.",
        "Give the total number of rows.",
        "ngram: {num_tables: 16, num_rows: 8, dim: 16}      # wrong",
    ),
    "MP711": CodeInfo(
        "more angles than pairs of state dims",
        "2 · `num_angles` is above `state_dim`.",
        "Each angle rotates two dims of a head's state.",
        "Use at most half of `state_dim`.",
        "mamba: {kind: mamba3, state_dim: 64, num_angles: 48}      # wrong: 96 of 64 dims",
    ),
    "MP712": CodeInfo(
        "indexer heads are narrower than the rotated dims",
        "The indexer's `head_dim` is below `qk_rope_head_dim`.",
        "The last `qk_rope_head_dim` dims of its queries and keys are rotated as attention's are.",
        "Use at least `qk_rope_head_dim`.",
        "attention: {kind: mla, qk_rope_head_dim: 64, indexer: {num_heads: 4, head_dim: 32, layers: [0]}}      # wrong",
    ),
    "MP713": CodeInfo(
        "full_layers without a window",
        "`full_layers` lists the A layers that do not use the window, and `window_size` is null.",
        "Without a window every layer attends to all earlier positions; the list would have no effect.",
        "Give `window_size`, or remove the list.",
        "attention: {kind: gqa, num_heads: 8, num_kv_heads: 8, head_dim: 64, full_layers: [0]}      # wrong",
    ),
    "MP714": CodeInfo(
        "time_step_min is not below time_step_max",
        "`time_step_min` is not below `time_step_max`.",
        "Time steps are clamped to their limits; with equal or crossed limits every step would be the same.",
        "Raise `time_step_max`, lower `time_step_min`, or write null for no upper limit.",
        "mamba: {kind: mamba2, time_step_min: 0.1, time_step_max: 0.001}      # wrong",
    ),
    "MP715": CodeInfo(
        "an option of a block does not fit the others",
        "An option needs another key, or a width or index is outside what the model has.",
        "It would name a tensor that the block does not have.",
        "Change the key that the message names.",
        "attention: {head_dim: 128, rotary_dim: 256}      # wrong: at most head_dim",
    ),
    "MP720": CodeInfo(
        "the family does not support the recompute policy",
        "`full` is set for E or M blocks.",
        "Recomputing an E block would run its dispatch twice, possibly with other counts; full recompute of an M block would run its "
        "scan twice. `selective` recomputes only their cheap operations.",
        "Write another policy for the letter under `recompute.blocks`.",
        "recompute: {default: full}                                          # wrong with E or M\n"
        "recompute: {default: full, blocks: {E: selective, M: selective}}",
    ),
    "MP721": CodeInfo(
        "a setting for a letter that is not in the pattern",
        "`recompute.blocks` or `precision.families` names a letter that no layer has.",
        "The setting would be ignored.",
        "Remove it, or correct the letter.",
        "pattern: AD\nrecompute: {blocks: {M: selective}}      # wrong",
    ),
    "MP722": CodeInfo(
        "the learning-rate schedule is longer than training",
        "warmup_steps + decay_steps exceed training.steps.",
        "The rate would not reach its base, or would not decay completely.",
        "Shorten a phase, or train longer.",
        "training: {steps: 1000, rate_schedule: {kind: wsd, warmup_steps: 100, decay_steps: 200}}",
    ),
    "MP723": CodeInfo(
        "more layers keep 16 bits than the model has",
        "The two numbers of precision.recipe.first_last_bf16 add up to more than model.num_layers.",
        "They count layers at the start and at the end of the stack whose linears keep precision.params.",
        "Use smaller numbers.",
        "model: {num_layers: 4}\nprecision: {recipe: {name: fp8_current, first_last_bf16: [3, 3]}}      # wrong",
    ),
    "MP724": CodeInfo(
        "delayed scaling would count a product twice",
        "Under fp8_delayed a module is recomputed whose output a quantised product reads, or some layers keep 16 bits.",
        "The recipe scales by maxima of past steps, and reduces them over all layers at once: a second run of a product, or one left out, "
        "would distort them. Megatron-Core refuses both.",
        "Use fp8_current, whose scales are of the tensor itself, or leave the module out.",
        "host: {recompute_modules: [moe_act]}\nprecision: {recipe: {name: fp8_delayed}}      # wrong\n"
        "precision: {recipe: {name: fp8_current}}      # right",
    ),
    "MP725": CodeInfo(
        "adapters of a linear that no layer has",
        "An entry of lora.families is neither a letter of the pattern nor the name of a linear in its layers.",
        "Adapters are added to linears of layers. Routers, expert banks, gates of one score, convolutions, embeddings and the head have "
        "none.",
        "Name a letter, a linear (q_proj) or a linear inside a part (shared.up_proj); null is all linears of layers.",
        "lora: {rank: 16, alpha: 32.0, families: [router]}      # wrong\n"
        "lora: {rank: 16, alpha: 32.0, families: [q_proj, v_proj]}      # right",
    ),
    "MP726": CodeInfo(
        "no frozen form of this with lora",
        "lora is given with a setting whose parameters or copies are not built or priced frozen.",
        "Under lora only adapters are trained. What has a loss of its own would not be frozen; it is refused instead of being left out.",
        "Use the value named, or train the model itself.",
        "lora: {rank: 16, alpha: 32.0}\nprecision: {recipe: {name: fp8_rowwise}}      # wrong",
    ),
    "MP729": CodeInfo(
        "a value that is legal and does not train",
        "A learning rate is above 1, or a convolution has more taps than the sequence has tokens.",
        "Such a run starts, and its loss diverges at once, or parameters stay as they were initialised.",
        "Correct the value; it is most likely a typing error.",
        "training: {learning_rate: 3.0e4}      # warned\ntraining: {learning_rate: 3.0e-4}",
    ),
    "MP790": CodeInfo(
        "not supported by megarun yet",
        "megaplan estimates the plan completely; this version of megarun cannot train it.",
        "The runtime never silently approximates an unsupported setting.",
        "No action is needed for planning. To train, use the value named.",
        "mesh: {tp: 8}      # planned; megarun trains with tp 1",
    ),
}

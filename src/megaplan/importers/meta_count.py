"""Parameters of a model that no import reads, counted by transformers' own build, in another process."""

import json
import subprocess
import sys
from importlib.util import find_spec

SECONDS = 120
_PROGRAM = """
import json, sys, warnings
warnings.filterwarnings("ignore")
import torch, transformers
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText
transformers.logging.set_verbosity_error()
given = json.load(sys.stdin)
given.pop("quantization_config", None)
given.pop("auto_map", None)
config = AutoConfig.for_model(given.pop("model_type"), **given)
for kind in (AutoModelForCausalLM, AutoModelForImageTextToText, AutoModel):
    try:
        with torch.device("meta"):
            model = kind.from_config(config)
        break
    except ValueError:
        continue
parts = {}
for name, each in model.named_parameters():
    words = name.split(".")
    part = next((word for word in words if any(one in word for one in ("vision", "audio", "visual", "projector"))), "")
    text = "towers" if part else "experts" if "experts" in words and "shared" not in name else "embedding" if "embed" in name else "other"
    parts[text] = parts.get(text, 0) + each.numel()
print(json.dumps([type(model).__name__, transformers.__version__, parts]))
"""


def counted(text: str) -> str | None:
    """Sentences about the parameters of a config and about unknown parts; None where transformers is not installed or cannot build it.

    No code of the config's repository is run: `auto_map` is ignored.

    Args:
        text: The config, a JSON object with `model_type`.
    """
    if find_spec("transformers") is None or find_spec("torch") is None:
        return None
    try:
        done = subprocess.run([sys.executable, "-c", _PROGRAM], input=text, capture_output=True, text=True, timeout=SECONDS, check=False)
        name, version, parts = json.loads(done.stdout.strip().rpartition("\n")[2])
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    shown = ", ".join(f"{each} {size:,}" for each, size in sorted(parts.items(), key=lambda item: -item[1]))
    return (
        f"{sum(parts.values()):,} parameters ({shown}) in the build of {name} by transformers {version} on the meta device\n"
        "not known: activations, their memory by rank, FLOPs and time, and how tensors are sharded"
    )

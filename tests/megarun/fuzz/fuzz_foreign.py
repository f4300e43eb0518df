"""Mutated files of others, read by the commands that take them: data files of checkpoints, safetensors, their index, tokenizers."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_commands import accepts, answer
from fuzz_inputs import json_bytes, mutated_bytes, mutated_tree

from megarun.checkpoint.manifest import MANIFEST, manifest_digest
from megarun.checkpoint.sums import record_of
from megarun.cli.main import run

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 257, "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False, "hidden_act": "silu", "rope_theta": 10000.0, "torch_dtype": "float32",
}  # fmt: skip
SETTINGS = ("batch.seq_length=16", "batch.micro_batch_size=1", "precision.params=fp32", "precision.grads=fp32", "training.steps=1")
DATA, WEIGHTS, INDEX = "__0_0.distcp", "model.safetensors", "model.safetensors.index.json"
LENGTH_BYTES = 8  # of a safetensors header, before it


class ForeignFiles:
    """Writes one mutated input after another and runs a command on it; the readers say whether it was taken.

    Args:
        folder: An empty folder.
        tokens: A token file of 257 ids.
    """

    def __init__(self, folder: Path, tokens: Path) -> None:
        folder.mkdir()
        self._folder, self._tokens = folder, tokens
        self._plan, self._model, out = folder / "plan.json", folder / "model", folder / "run"
        config = folder / "config.json"
        config.write_text(json.dumps(CONFIG))
        settings = [word for each in SETTINGS for word in ("--set", each)]
        assert answer(["import", "hf", str(config), "-o", str(folder / "spec.yaml")])[0] == 0
        assert answer(["split", str(folder / "spec.yaml"), *settings, "-o", str(self._plan)])[0] == 0
        words = ["train", str(self._plan), "--data", str(tokens), "--out", str(out), "--save-every", "1"]
        assert answer(words, run)[0] == 0
        self._checkpoint = out / "checkpoints" / "step-00000001"
        export = ["checkpoint", "export", str(out), "-o", str(self._model), "--format", "hf", "--config", str(config)]
        assert answer(export, run)[0] == 0
        self._weights = (self._model / WEIGHTS).read_bytes()
        self._tokenizer = tokens.with_name(f"{tokens.name}.tokenizer.json").read_bytes()
        self.readers: dict[str, Callable[[random.Random], bool]] = {
            "data file": self.data_file,
            "safetensors": self.safetensors,
            "index of safetensors": self.index,
            "tokenizer": self.tokenizer,
        }

    def data_file(self, draw: random.Random) -> bool:
        """A data file, under sums that match, so that its reader sees it."""
        copy = self._new("step-00000001")
        shutil.copytree(self._checkpoint, copy)
        (copy / DATA).write_bytes(mutated_bytes((copy / DATA).read_bytes(), draw))
        manifest = json.loads((copy / MANIFEST).read_text())
        record = record_of(copy / DATA)
        manifest["files"][DATA] = {"bytes": record.bytes, "sha256": record.sha256}
        manifest["digest"] = manifest_digest(manifest)
        (copy / MANIFEST).write_text(json.dumps(manifest))
        return self._takes(["checkpoint", "export", str(copy), "-o", str(self._new("all.safetensors"))])

    def safetensors(self, draw: random.Random) -> bool:
        """Weights of a model: bytes, or the header with another tree."""
        data = self._weights
        if draw.random() < 0.5:
            size = int.from_bytes(data[:LENGTH_BYTES], "little")
            tree = mutated_tree(json.loads(data[LENGTH_BYTES : LENGTH_BYTES + size]), draw)
            header = json_bytes(tree)
            data = len(header).to_bytes(LENGTH_BYTES, "little") + header + data[LENGTH_BYTES + size :]
        else:
            data = mutated_bytes(data, draw)
        return self._imports({WEIGHTS: data})

    def index(self, draw: random.Random) -> bool:
        """The index of a model's weights."""
        size = int.from_bytes(self._weights[:LENGTH_BYTES], "little")
        names = [name for name in json.loads(self._weights[LENGTH_BYTES : LENGTH_BYTES + size]) if name != "__metadata__"]
        tree: Any = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(names, WEIGHTS)}
        text = json.dumps(mutated_tree(tree, draw)).encode("utf-8", "surrogatepass")
        return self._imports(
            {WEIGHTS: self._weights, INDEX: text if draw.random() < 0.6 else mutated_bytes(json.dumps(tree).encode(), draw)}
        )

    def tokenizer(self, draw: random.Random) -> bool:
        """A published tokenizer for a text."""
        file, text = self._new("tokenizer.json"), self._folder / "text"
        text.mkdir(exist_ok=True)
        (text / "a.txt").write_text("one text\n")
        source, whole = self._tokenizer, draw.random() < 0.6
        file.write_bytes(json_bytes(mutated_tree(json.loads(source), draw)) if whole else mutated_bytes(source, draw))
        return self._takes(["data", "tokenize", str(text), "-o", str(self._new("made.tokens")), "--tokenizer", str(file)])

    def _imports(self, files: dict[str, bytes]) -> bool:
        model = self._new("mutated")
        model.mkdir()
        shutil.copy(self._model / "config.json", model)
        for name, data in files.items():
            (model / name).write_bytes(data)
        return self._takes(["checkpoint", "import", str(self._plan), str(model), "-o", str(self._new("imported"))])

    def _takes(self, words: list[str]) -> bool:
        return accepts(words, run, (0, 2))

    def _new(self, name: str) -> Path:
        """A path at which nothing is."""
        path = self._folder / "new" / name
        path.parent.mkdir(exist_ok=True)
        if path.is_dir():
            shutil.rmtree(path)
        path.unlink(missing_ok=True)
        return path

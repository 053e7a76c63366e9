"""Import a Hugging Face model directory into a model repository, and print the memory that serving it needs.

    python examples/huggingface.py ~/bert-base-uncased

Without a directory, it makes a tiny BERT with random weights. Then: `cohabit serve models --memory 1MiB`.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

COHABIT = (sys.executable, "-m", "cohabit.server.cli")


def tiny_bert(folder: Path) -> Path:
    from transformers import BertConfig, BertModel

    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = BertConfig(vocab_size=500, max_position_embeddings=32, **sizes)
    BertModel(config).save_pretrained(folder)
    return folder


def main() -> int:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else tiny_bert(Path(made))
        name = folder.name if len(sys.argv) > 1 else "tiny_bert"
        # The module is exported with a dynamic batch, compared with eager PyTorch, and written with a config.pbtxt.
        subprocess.run([*COHABIT, "import", str(folder), "--name", name, "--max-batch", "2"], check=True)
    return subprocess.call([*COHABIT, "check", f"models/{name}"])


if __name__ == "__main__":
    sys.exit(main())

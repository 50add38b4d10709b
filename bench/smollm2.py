"""What the measurements run on: SmolLM2-135M, the demo model's folder, or where that is absent random weights of the same shape."""

import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "models/SmolLM2-135M-Instruct"


def random_model() -> Any:
    """30 layers, hidden size 576, 9 heads on 3 keys and values, 49,152 tokens, tied head; float32."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rope_theta=100000.0, rms_norm_eps=1e-5, initializer_range=0.041666666666666664, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )).float()  # fmt: skip


def folder(aside: Path) -> str:
    """The demo model's folder, or one with random weights and a tokenizer of single characters, written to `aside`."""
    if DEMO.exists():
        return str(DEMO)
    sys.path.append(str(ROOT / "tests"))
    from tiny import tokenizer

    random_model().save_pretrained(aside)
    tokenizer().save_pretrained(aside)
    return str(aside)

"""What the tests run on: a random two-layer Llama, a tokenizer of single characters with a ChatML template, and small fakes."""

import string
from pathlib import Path

import torch

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]


def tokenizer(chat_template: str | None = CHATML):
    """One token per printable character, and three special ones. The padding token is the end token, as in many models."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *string.printable])}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<|endoftext|>"))
    core.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    core.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>", pad_token="<|im_end|>", bos_token="<|im_start|>", unk_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL[:1]})
    made.chat_template = chat_template
    return made


def llama(tied: bool = True, seed: int = 0, hidden: int = 64, vocabulary: int = 128, **settings):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        max_position_embeddings=1024, tie_word_embeddings=tied, initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=2, **settings,
    )  # fmt: skip
    torch.manual_seed(seed)
    return LlamaForCausalLM(config).float()


def save_model(folder: Path, tied: bool = True, chat_template: str | None = CHATML, **settings) -> str:
    """A model folder as users have them: weights, config, generation config, tokenizer."""
    llama(tied, **settings).save_pretrained(folder)
    tokenizer(chat_template).save_pretrained(folder)
    return str(folder)

